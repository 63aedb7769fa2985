"""Which groups the filter that we ship keeps."""

from types import SimpleNamespace

import pytest

from vime.plugins import CONTRACTS
from vime.plugins.answers import Kept
from vime.plugins.catalog import load_hook
from vime.rollout.filters import check_reward_nonzero_std
from vime.types import Sample, Status

ARGS = SimpleNamespace(reward_key=None)


def group_of(*rewards):
    return [
        Sample(index=i, group_index=0, reward=reward, status=Status.COMPLETED, tokens=[1, 2], response_length=1)
        for i, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((0.0, 1.0), Kept(keep=True)),
        ((0.9,) * 12, Kept(keep=False, reason="zero_std_0.9")),  # rounding residue of the mean is no difference
        ((0.0, 0.0, 0.0), Kept(keep=False, reason="zero_std_0.0")),
        ((1.0,), Kept(keep=False, reason="zero_std_1.0")),
        ((0.0, 1e-6), Kept(keep=False, reason="zero_std_0.0")),  # std 7.1e-7
        ((0.0, 2e-6), Kept(keep=True)),  # std 1.4e-6
        ((1.0, None, 1.0), Kept(keep=False, reason="zero_std_1.0")),
        ((1.0, None, 0.0), Kept(keep=True)),
        ((1.0, float("nan")), Kept(keep=False, reason="zero_std_1.0")),
        ((None, None), Kept(keep=False, reason="no_reward")),
    ],
)
def test_a_group_counts_when_its_rewards_differ(rewards, kept):
    assert check_reward_nonzero_std(ARGS, group_of(*rewards)) == kept


def test_a_reward_of_several_values_is_read_by_its_key():
    group = group_of({"acc": 1.0, "len": 0.5}, {"acc": 1.0, "len": 0.1})
    assert not check_reward_nonzero_std(SimpleNamespace(reward_key="acc"), group).keep
    assert check_reward_nonzero_std(SimpleNamespace(reward_key="len"), group).keep


@pytest.mark.parametrize("path", ["filters", "filter_hub.dynamic_sampling_filters"])
def test_both_of_its_names_keep_the_contract(path):
    contract = CONTRACTS["dynamic_sampling_filter_path"]
    hook = load_hook(f"vime.rollout.{path}.check_reward_nonzero_std", contract.flag, contract)
    assert hook.function is check_reward_nonzero_std
