"""The rewards that training uses, as the flags say."""

import pytest

from tests.config.conftest import flags, model_dir, prompt_file  # noqa: F401
from vime.config import parse_config
from vime.rollout.shaping import equal_rewards_cancel, shape_rewards
from vime.types import Sample


def shaped(words, rewards, lengths=None):
    """Raw and processed rewards of two groups of two."""
    lengths = lengths or [1] * len(rewards)
    samples = [
        Sample(index=i, group_index=i // 2, reward=reward, response_length=length)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return shape_rewards(parse_config(words))(samples)


def test_grpo_divides_by_the_deviation_unless_told_otherwise(flags):  # noqa: F811
    raw, rewards = shaped(flags(), [1.0, 0.0, 5.0, 5.0])
    assert raw == [1, 0, 5, 5]
    assert rewards == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)
    for words in (["--disable-grpo-std-normalization"], ["--use-dr-grpo"]):
        assert shaped(flags(*words), [1.0, 0.0, 5.0, 5.0])[1] == [0.5, -0.5, 0, 0]


@pytest.mark.parametrize(
    ("words", "cancel"),
    [
        ("", True),
        ("--use-dr-grpo", True),
        ("--disable-rewards-normalization", False),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages", False),
        ("--overlong-buffer-len 8", False),
    ],
)
def test_equal_rewards_of_a_group_cancel_where_they_are_compared(flags, words, cancel):  # noqa: F811
    assert equal_rewards_cancel(parse_config(flags(*words.split()))) is cancel


def test_children_of_one_sample_have_one_entry_in_the_baseline(flags):  # noqa: F811
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]  # three children, and three samples alone: as [1, 0, 0, 0]
    samples = [
        Sample(index=i, group_index=0, parent_index=0 if i < 3 else None, reward=reward)
        for i, reward in enumerate(rewards)
    ]
    raw, found = shape_rewards(parse_config(flags()))(samples)
    assert raw == rewards
    assert found == pytest.approx([1.5, 1.5, 1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_rewards_may_stay_as_they_are(flags):  # noqa: F811
    assert shaped(flags("--disable-rewards-normalization"), [1.0, 0.0])[1] == [1, 0]
    words = flags("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages")
    assert shaped(words, [1.0, 0.0])[1] == [1, 0]


def test_long_answers_lose_reward_before_it_is_normalized(flags):  # noqa: F811
    # 64 tokens at most, 16 of buffer: 56 tokens lose half of the factor
    words = flags("--overlong-buffer-len", "16", "--overlong-penalty-factor", "0.5", "--disable-grpo-std-normalization")
    raw, rewards = shaped(words, [1.0, 1.0, 0.0, 1.0], [10, 56, 64, 48])
    assert raw == [1, 1, 0, 1], "what is reported is what the grader said"
    assert rewards == [0.125, -0.125, -0.75, 0.75]
