"""The log-prob head against torch's log_softmax over whole logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vime.platform import current
from vime.training import logprobs
from vime.training.logprobs import TokenLogProbs, Vocabulary, token_log_probs

TOKENS, HIDDEN, VOCABULARY = 11, 16, 50


def inputs(
    dtype: torch.dtype = torch.float64, rows: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(rows, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> TokenLogProbs:
    log_probs = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return TokenLogProbs(log_probs.gather(1, targets[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(-1))


def gradients(answer: TokenLogProbs, *of: torch.Tensor, entropy: float = 0.3) -> tuple[torch.Tensor, ...]:
    upstream = torch.linspace(-1, 1, TOKENS)
    return torch.autograd.grad(
        (answer.log_probs_t * upstream).sum() + entropy * (answer.entropy_t * upstream).sum(), of
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(temperature: float) -> None:
    hidden, weight, targets = inputs(torch.float32)
    answer = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY), temperature=temperature)
    expected = plain(hidden, weight, targets, temperature)
    for found, wanted in zip(answer, expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients(answer, hidden, weight), gradients(expected, hidden, weight), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_log_probs_alone_needs_no_entropy() -> None:
    hidden, weight, targets = inputs(torch.float32)
    answer = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY))
    (found,) = torch.autograd.grad(answer.log_probs_t.sum(), weight)
    (wanted,) = torch.autograd.grad(plain(hidden, weight, targets).log_probs_t.sum(), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs(torch.float32)
    whole = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY))
    expected = [*whole, *gradients(whole, hidden, weight)]
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", 4 * VOCABULARY)  # three blocks, the last of three tokens
    small = dataclasses.replace(current(), slice_elements=3 * VOCABULARY)
    monkeypatch.setattr(logprobs, "current", lambda: small)
    blocks = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY))
    for found, wanted in zip([*blocks, *gradients(blocks, hidden, weight)], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_rows_that_only_pad_the_vocabulary_take_no_part() -> None:
    hidden, weight, targets = inputs(torch.float32, rows=VOCABULARY + 6)
    answer = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY))
    expected = plain(hidden, weight[:VOCABULARY], targets)
    torch.testing.assert_close(answer.log_probs_t, expected.log_probs_t, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(answer.log_probs_t.sum(), weight)
    assert found.shape == weight.shape
    assert (found[VOCABULARY:] == 0).all()


def test_a_second_backward_computes_the_logits_again() -> None:
    hidden, weight, targets = inputs(torch.float32)
    loss = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY)).log_probs_t.sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(first, second)


def test_the_last_shard_of_an_uneven_vocabulary_is_shorter() -> None:
    assert Vocabulary.shard(total=50, rows=26, rank=0, group=None) == Vocabulary(0, 26)
    assert Vocabulary.shard(total=50, rows=26, rank=1, group=None) == Vocabulary(26, 24)


def test_a_rank_that_has_nothing_to_predict_has_gradients_of_zero() -> None:
    hidden, weight, targets = inputs(torch.float32)
    answer = token_log_probs(hidden[:0], weight, targets[:0], Vocabulary(0, VOCABULARY))
    assert answer.log_probs_t.shape == (0,)
    found = torch.autograd.grad(answer.log_probs_t.sum() + answer.entropy_t.sum(), (hidden, weight))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found)


def test_the_gradient_of_the_weight_may_be_added_to_megatrons_buffer() -> None:
    """Twice, as for two micro-batches; rows that only pad stay as they are."""
    hidden, weight, targets = inputs(torch.float32, rows=VOCABULARY + 6)
    (once,) = torch.autograd.grad(plain(hidden, weight[:VOCABULARY], targets).log_probs_t.sum(), weight)
    weight.main_grad = torch.ones_like(weight)
    weight.grad_added_to_main_grad = False
    for _ in range(2):
        answer = token_log_probs(hidden, weight, targets, Vocabulary(0, VOCABULARY), adds=True)
        answer.log_probs_t.sum().backward(inputs=[weight])
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, 1 + 2 * once, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight.grad, torch.zeros_like(weight)), "hooks are called, and have nothing to add"
