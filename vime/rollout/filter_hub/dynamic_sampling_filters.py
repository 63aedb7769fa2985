"""The filters of ``vime.rollout.filters``."""

from vime.rollout.filters import check_reward_nonzero_std

__all__ = ["check_reward_nonzero_std"]
