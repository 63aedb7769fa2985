"""A stand-in for the engines that says what a test wants the model to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.rollout.fakes import routes_wanted
from vime.types import Generation, SamplingParams

Script = Callable[[str, int], str]
"""(text so far, request number of this session) → what the model says, with its end token."""


class ScriptedGenerator:
    """Implements ``ports.Generator``. Keeps what it was given and what it answered, by session.

    Args:
        script: a turn longer than ``max_tokens`` is cut off there, with finish_reason "length".
        aborts: numbers of requests of a session that are aborted after ``abort_after`` tokens.
    """

    def __init__(self, tokenizer: Any, script: Script, *, aborts: Sequence[int] = (), abort_after: int = 2) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.aborts = set(aborts)
        self._abort_after = abort_after
        self.requests: dict[str, list[tuple[list[int], SamplingParams]]] = {}
        self.answers: dict[str, list[Generation]] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Generation:
        requests = self.requests.setdefault(session_id, [])
        number = len(requests)
        requests.append((list(token_ids), params))
        ids = self._tokenizer.encode(self._script(self._tokenizer.decode(token_ids), number), add_special_tokens=False)
        reason = "stop"
        if number in self.aborts:
            ids, reason = ids[: self._abort_after], "abort"
        elif len(ids) > params.max_tokens:
            ids, reason = ids[: params.max_tokens], "length"
        answer = Generation(
            token_ids=ids,
            log_probs=[-0.5 - number] * len(ids),
            weight_versions=[number + 1] * len(ids),
            finish_reason=reason,
            routed_experts=routes_wanted(params, [*token_ids, *ids], number + 1) if ids else None,
        )
        self.answers.setdefault(session_id, []).append(answer)
        return answer

    async def abort(self) -> None: ...


def turns(*said: str) -> Script:
    """The n-th request of every session is answered with the n-th text, the last one again and again."""
    return lambda text, number: said[min(number, len(said) - 1)]
