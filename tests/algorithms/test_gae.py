"""Generalized advantage estimation over trained tokens, token rewards, PPO's estimator and the value loss."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algorithms import advantages
from vime.algorithms.advantages import AdvantageSettings, PackedSamples
from vime.algorithms.gae import gae, token_rewards
from vime.algorithms.kl import kl
from vime.algorithms.value_loss import value_loss


def gae_by_loops(rewards, values, mask, lengths, gamma, lambd):
    """The recurrence of the definition, backwards through each sample, in NumPy's float64."""
    found, start = np.zeros(len(values)), 0
    for length in lengths:
        advantage = next_value = 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                advantage = found[t] = delta + gamma * lambd * advantage
                next_value = values[t]
        start += length
    return found


VALUES = torch.tensor([0.5, 0.6, 0.4])
LENGTHS = torch.tensor([3])


def test_gae_of_three_tokens():
    # λ = .95: δ = [.1, -.2, .6], A = [.1 + .95 · .37, -.2 + .95 · .6, .6]
    found = gae(torch.tensor([0.0, 0, 1]), VALUES, torch.ones(3), LENGTHS, lambd=0.95)
    assert found.tolist() == pytest.approx([0.4515, 0.37, 0.6])
    assert (found + VALUES).tolist() == pytest.approx([0.9515, 0.97, 1.0])


def test_gae_steps_over_tokens_that_are_not_trained():
    # δ = [.4 - .5, ·, .6], A = [-.1 + .95 · .6, ·, .6]
    found = gae(torch.tensor([0.0, 0, 1]), VALUES, torch.tensor([1, 0, 1]), LENGTHS, lambd=0.95)
    assert found.tolist() == pytest.approx([0.47, 0.0, 0.6])


def test_discounted_returns_are_gae_without_values():
    # γ = .9, rewards -.1 · [.1, .2, .3] and 1 at the end: G = [.7577, .853, .97]
    rewards = torch.tensor([-0.01, -0.02, 0.97])
    found = gae(rewards, torch.zeros(3), torch.ones(3), LENGTHS, gamma=0.9)
    assert found.tolist() == pytest.approx([0.7577, 0.853, 0.97])


samples = st.lists(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.booleans()), max_size=20), max_size=6)


@given(samples, st.floats(0, 1), st.floats(0, 1))
def test_gae_agrees_with_the_recurrence(packed, gamma, lambd):
    tokens = [token for sample in packed for token in sample]
    rewards, values, mask = (np.array([token[i] for token in tokens], dtype=float) for i in range(3))
    lengths = [len(sample) for sample in packed]
    arrays = (torch.from_numpy(rewards), torch.from_numpy(values), torch.from_numpy(mask).bool())
    found = gae(*arrays, torch.tensor(lengths, dtype=torch.int64), gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(found, gae_by_loops(rewards, values, mask, lengths, gamma, lambd), atol=1e-9)


@given(samples)
def test_the_reward_arrives_at_the_last_trained_token(packed):
    mask = torch.tensor([token[2] for sample in packed for token in sample], dtype=torch.bool)
    lengths = torch.tensor([len(sample) for sample in packed], dtype=torch.int64)
    rewards = torch.arange(1.0, len(packed) + 1)
    found = token_rewards(rewards, mask, lengths).split(lengths.tolist())
    for sample, part, reward in zip(packed, found, rewards.tolist(), strict=True):
        trained = [place for place, token in enumerate(sample) if token[2]]
        expected = [0.0] * len(sample)
        if trained:
            expected[trained[-1]] = reward
        assert part.tolist() == expected


def test_a_long_sample_keeps_its_digits():
    length = 32_768
    found = gae(torch.zeros(length).index_fill_(0, torch.tensor([length - 1]), 1.0), *constant(length), gamma=0.9999)
    assert found[0] == pytest.approx(0.9999 ** (length - 1), rel=1e-6)


def constant(length):
    return torch.zeros(length), torch.ones(length), torch.tensor([length])


def packed_samples(**fields):
    return PackedSamples(
        rewards_n=torch.tensor([1.0, -2.0]),
        lengths_n=torch.tensor([3, 2]),
        mask_t=torch.tensor([1, 1, 0, 1, 1]),
        values_t=torch.tensor([0.5, 0.6, 9.0, 0.1, 0.2]),
        **fields,
    )


def test_ppo_pays_the_kl_of_each_trained_token():
    samples = packed_samples(
        log_probs_t=torch.tensor([-1.0, -2.0, 0.0, -1.0, -1.0]),
        ref_log_probs_t=torch.tensor([-1.5, -1.0, -9.0, -1.0, -3.0]),
    )
    settings = AdvantageSettings(kl_coef=0.1, kl_kind="k1", gamma=0.9, lambd=0.8)
    # k1 = [.5, -1, ·, 0, 2]; the reward of the first sample comes with its second token
    rewards = [-0.05, 1.1, 0.0, 0.0, -2.2]
    expected = gae_by_loops(rewards, samples.values_t.tolist(), samples.mask_t.tolist(), [3, 2], 0.9, 0.8)
    assert advantages.get("ppo").advantages(samples, settings).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_in_the_reward_is_of_the_kind_that_was_asked_for(kind):
    new, ref = torch.tensor([-1.0, -2, 0, -1, -1]), torch.tensor([-1.5, -1, 0, -1, -3])
    found = packed_samples(log_probs_t=new, ref_log_probs_t=ref).token_rewards(
        AdvantageSettings(kl_coef=0.5, kl_kind=kind)
    )
    assert found[0] == pytest.approx(-0.5 * float(kl(new, ref, kind).values_t[0]))


def test_ppo_takes_rewards_as_they_are_and_refuses_those_that_are_no_numbers():
    assert advantages.get("ppo").normalize_rewards([1, 5, 5], [0, 0, 0]) == [1.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="position 1 must be a finite number, not nan"):
        advantages.get("ppo").normalize_rewards([1.0, float("nan")], [0, 0])


def test_value_loss_takes_the_worse_of_the_clipped_and_the_free_value():
    # old .5, clip .2: a value may move to .3 … .7
    values = torch.tensor([0.6, 1.0, 1.0, 0.0], requires_grad=True)
    found = value_loss(values, torch.full((4,), 0.5), torch.tensor([1.0, 1.0, 0.0, 1.0]), clip=0.2)
    assert found.loss_t.tolist() == pytest.approx([0.16, 0.09, 1.0, 1.0])
    assert found.clipped_t.tolist() == [False, True, False, False]
    found.loss_t.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.8, 0.0, 2.0, -2.0])


@given(st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=20), st.floats(0, 2))
def test_value_loss_agrees_with_numpy(tokens, clip):
    values, old, returns = np.array(tokens).T
    held = np.clip(values, old - clip, old + clip)
    expected = np.maximum((values - returns) ** 2, (held - returns) ** 2)
    found = value_loss(*(torch.from_numpy(each.copy()) for each in (values, old, returns)), clip=clip)
    np.testing.assert_allclose(found.loss_t, expected, atol=1e-9)
