"""The teacher of on-policy distillation on a vLLM server: log-probs of tokens that another model sampled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from vime.serving.http import EngineError, HttpServer, Refused, Unreachable, back_off, is_final

__all__ = ["TeacherClient", "prompt_log_probs"]


class TeacherClient:
    """Implements ``ports.Teacher`` over the OpenAI completions of a vLLM server (``--opd-teacher-url``).

    The tokens go as the prompt, and the server says the log-prob of each: at temperature 1, without any truncation. It
    has to sample one token more, so its ``--max-model-len`` must be one above the longest sample.

    Args:
        concurrency: requests at a time; a pass over a prompt keeps nothing on the server.
    """

    def __init__(self, url: str, *, timeout_s: float = 1800.0, concurrency: int = 64) -> None:
        self._server = HttpServer("the teacher", url)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)

    async def log_probs(self, token_ids: Sequence[int], response_length: int) -> list[float]:
        """The log-probs of the last ``response_length`` tokens, in nats.

        Raises:
            EngineError: no attempt was answered, the request is refused, or the answer lacks a token.
        """
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        async with self._slots:
            answer = await self._answer(body)
        return prompt_log_probs(answer, token_ids)[len(token_ids) - response_length :]

    async def close(self) -> None:
        await self._server.close()

    async def _answer(self, body: dict[str, Any]) -> Any:
        for attempt in itertools.count(1):
            try:
                return await self._server.call("POST", "/v1/completions", body, timeout_s=self._timeout_s)
            except (Unreachable, Refused) as error:
                if is_final(error, attempt):
                    raise
            await back_off(attempt)
        raise AssertionError("unreachable")


def prompt_log_probs(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """The log-prob of each token of the prompt; NaN of the first one, which nothing predicts.

    Raises:
        EngineError: the answer does not have those of these tokens.
    """
    try:
        said = answer["choices"][0]["prompt_logprobs"]
        found = [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], said[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"the teacher's answer has no log-probs of the tokens ({error!r}): {str(answer)[:300]}"
        ) from None
    return [float("nan"), *found]
