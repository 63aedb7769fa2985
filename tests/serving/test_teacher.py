"""A teacher on a real server: log-probs of tokens that it did not sample."""

from __future__ import annotations

import math

import pytest
import torch

from tests.serving.conftest import TOLERANCE, Served, reference
from vime.serving.http import EngineError, Unreachable
from vime.serving.teacher import TeacherClient, prompt_log_probs

TOKENS = [1, 40, 41, 300, 42, 7, 300, 300, 2]


async def test_log_probs_are_those_of_transformers(tied_engine: Served) -> None:
    """Also of what a server may have cached from an earlier question."""
    teacher = TeacherClient(tied_engine.url, timeout_s=60)
    try:
        for response_length in (6, 6, 1, len(TOKENS) - 1):
            found = await teacher.log_probs(TOKENS, response_length)
            split = len(TOKENS) - response_length
            expected = reference(tied_engine.folder, {}, TOKENS[:split], TOKENS[split:])
            assert torch.tensor(found).sub(expected).abs().max() < TOLERANCE
    finally:
        await teacher.close()


async def test_tokens_that_the_teacher_does_not_know_are_refused_by_its_words(tied_engine: Served) -> None:
    teacher = TeacherClient(tied_engine.url, timeout_s=60)
    try:
        with pytest.raises(EngineError, match=r"the teacher \(http://.*\) answered /v1/completions with 400"):
            await teacher.log_probs([1, 10**6], 1)
    finally:
        await teacher.close()


async def test_a_teacher_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.serving.http.BACKOFF_S", 0.0)
    teacher = TeacherClient("http://127.0.0.1:9", timeout_s=5)
    with pytest.raises(Unreachable, match=r"the teacher \(http://127.0.0.1:9\) cannot be reached"):
        await teacher.log_probs(TOKENS, 1)
    await teacher.close()


def test_the_log_prob_of_each_token_is_picked_from_what_the_server_says() -> None:
    """Beside the token's own there may be that of the likeliest one; nothing predicts the first token."""
    said = [None, {"40": {"logprob": -1.5}, "9": {"logprob": -0.5}}, {"41": {"logprob": -2.0}}]
    first, *rest = prompt_log_probs({"choices": [{"prompt_logprobs": said}]}, [1, 40, 41])
    assert math.isnan(first)
    assert rest == [-1.5, -2.0]


@pytest.mark.parametrize("said", [None, [None], [None, {"9": {"logprob": -1.0}}]])
def test_an_answer_without_log_probs_of_the_tokens_is_an_error(said: object) -> None:
    with pytest.raises(EngineError, match="no log-probs of the tokens"):
        prompt_log_probs({"choices": [{"prompt_logprobs": said}]}, [1, 40])
