"""Which policy counts as the one that sampled, and what is done about tokens that another one did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """Formulas: ``vime.algorithms.corrections``."""

    use_rollout_logprobs: bool = flag(
        False, help="The log-probs of the engine, as they came with the tokens, are those of the old policy."
    )
    keep_old_actor: bool = flag(
        False,
        help="The old policy has the weights that the engine sampled with, kept in host memory until they are trained "
        "on; of several the newest. It matters where training goes on in the meantime.",
    )
    use_tis: bool = derived(
        "max-staleness above 0, where it can be",
        help="Weigh each token's loss by the ratio of trainer to engine (importance sampling).",
    )
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token", help="The ratio of a token, of its whole sample, or the geometric mean over its sample."
    )
    tis_mode: Literal["truncate", "clip", "mask"] = flag(
        "clip", help="Ratios above --tis-clip are cut, those outside of both bounds are cut, or left out (IcePop)."
    )
    tis_clip: float = flag(2.0, help="Upper bound of the ratio.")
    tis_clip_low: float = flag(0.0, help="Lower bound of the ratio.")
    tis_veto: float | None = flag(
        None, help="Leave out a sample in which one trained token has a ratio below this, 1e-4 for instance."
    )
    tis_batch_normalize: bool = flag(
        False, help="Scale the ratios of a step to a mean of 1 over its trained tokens, after every bound."
    )
    use_opsm: bool = flag(
        False, help="Leave out tokens of negative advantage in samples that the policy has moved away from."
    )
    opsm_delta: float = flag(1e-4, help="How far, as mean nats a token of KL from the old policy to the current one.")
    get_mismatch_metrics: bool = flag(
        False, help="Accepted for old command lines: how trainer and engine differ is always reported."
    )
