"""What was said in one episode, as token ids that only ever grow.

There are two ways to add to a transcript, and each knows what its tokens are:

* ``sampled``: what an engine answered; trained (mask 1), with the log-probs and weight versions of the engine, and with
  the routes of all that it had not told yet;
* ``said``: what the environment says (tool results, hints, the next question, what the template puts between turns);
  not trained (mask 0), log-prob 0, and the version of the sampled tokens around it.

Nothing is ever rendered or encoded anew, so the tokens that are trained are those that were sampled, in the context in
which they were sampled.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import UserError
from vime.metadata import MULTI_TURN, multi_turn_of
from vime.models.routes import Pieces, grown, pieces_of, whole
from vime.types import Generation, Sample, Status, WeightVersion

__all__ = ["METADATA_KEY", "NotAppended", "Transcript", "final_answer", "marked"]

METADATA_KEY = MULTI_TURN
"""Where the metadata of a sample say what is known of its turns."""


class NotAppended(UserError):
    """What was to be added, or written, is no continuation of what stands there."""


class Transcript:
    """A prompt and what followed it.

    Args:
        prompt: token ids.

    Raises:
        NotAppended: the prompt has no tokens.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = _checked_ids(prompt, "the prompt")
        if not self._tokens:
            raise NotAppended("a transcript begins with a prompt of at least one token")
        self._prompt_length = len(self._tokens)
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[WeightVersion | None] = []  # None: said before anything was sampled
        self._turns: list[range] = []
        self._routes: Pieces = ()

    @classmethod
    def of(cls, sample: Sample) -> Transcript:
        """What an interrupted sample holds, to go on from there.

        Raises:
            NotAppended: it has no tokens, response tokens without log-probs or versions, or routes of more tokens than
                it can have.
        """
        found = cls(sample.tokens[: sample.prompt_length])
        length = sample.response_length
        mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
        log_probs, versions = list(sample.rollout_log_probs or ()), list(sample.weight_versions)
        if not len(mask) == len(log_probs) == length or len(versions) not in (0, length):
            raise NotAppended(
                f"{sample.name}: {length} response tokens cannot be continued with {len(mask)} entries of the mask, "
                f"{len(log_probs)} log-probs and {len(versions)} weight versions"
            )
        found._tokens += _checked_ids(sample.tokens[sample.prompt_length :], sample.name)
        found._mask, found._log_probs = mask, log_probs
        found._versions = list(versions) or [None] * length
        found._turns = _turns_of(sample.metadata, mask, found._prompt_length)
        try:
            found._routes = pieces_of(sample.rollout_routed_experts, len(sample.tokens))
        except ValueError as error:
            raise NotAppended(f"{sample.name}: its rollout_routed_experts {error}") from None
        return found

    def copy(self) -> Transcript:
        """Another with the same content; what is added to one is not in the other."""
        other = copy.copy(self)
        other._tokens, other._mask, other._log_probs = self._tokens[:], self._mask[:], self._log_probs[:]
        other._versions, other._turns = self._versions[:], self._turns[:]
        return other

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """[L] all ids: what an engine is given for the next turn."""
        return tuple(self._tokens)

    @property
    def prompt_length(self) -> int:
        return self._prompt_length

    @property
    def response_length(self) -> int:
        """T: all that followed the prompt."""
        return len(self._tokens) - self._prompt_length

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """[T] 1 = sampled, 0 = said by the environment."""
        return tuple(self._mask)

    @property
    def routes(self) -> Pieces:
        """Where the first tokens were sent by the engines' routers, if they told; ``models.routes`` has what goes on
        from there."""
        return self._routes

    @property
    def turns(self) -> tuple[range, ...]:
        """Where in ``tokens`` the turns of the model stand. What was sampled in several pieces is one turn."""
        return tuple(self._turns)

    def turn(self, number: int) -> tuple[int, ...]:
        """Token ids of one turn of the model; -1 is the last one."""
        where = self._turns[number]
        return tuple(self._tokens[where.start : where.stop])

    @property
    def last_turn(self) -> tuple[int, ...]:
        """What the model said last, if nothing was said since."""
        return self.turn(-1) if self.in_turn else ()

    @property
    def in_turn(self) -> bool:
        """Whether the last tokens are the model's own."""
        return bool(self._turns) and self._turns[-1].stop == len(self._tokens)

    def sampled(self, generation: Generation, given: Sequence[int]) -> None:
        """Appends what an engine sampled.

        Args:
            given: the token ids that the engine continued.

        Raises:
            NotAppended: the engine was given something else than this transcript, or its answer lacks log-probs or
                versions, or has routes that are not those of these tokens.
        """
        if not (len(given) == len(self._tokens) and list(given) == self._tokens):
            raise NotAppended(
                f"the engine continued {len(given)} tokens which are not the {len(self._tokens)} of this transcript"
            )
        ids = _checked_ids(generation.token_ids, "a generation")
        if not len(ids) == len(generation.log_probs) == len(generation.weight_versions):
            raise NotAppended(
                f"a generation of {len(ids)} tokens has {len(generation.log_probs)} log-probs and "
                f"{len(generation.weight_versions)} weight versions"
            )
        if not all(map(math.isfinite, generation.log_probs)):
            raise NotAppended("a generation has a log-prob that is not finite")
        try:
            routes = grown(self._routes, generation.routed_experts, len(self._tokens) + len(ids))
        except ValueError as error:
            raise NotAppended(f"the routes of a generation {error}") from None
        begin = self._turns.pop().start if self.in_turn else len(self._tokens)
        self._append(ids, 1, generation.log_probs, generation.weight_versions)
        self._routes = routes
        if begin < len(self._tokens):
            self._turns.append(range(begin, len(self._tokens)))

    def said(self, token_ids: Sequence[int]) -> None:
        """Appends what the environment says.

        Raises:
            NotAppended: they are no token ids.
        """
        ids = _checked_ids(token_ids, "what the environment says")
        version = self._versions[-1] if self._versions else None
        self._append(ids, 0, [0.0] * len(ids), [version] * len(ids))

    def write(self, sample: Sample, *, status: Status, response: str) -> None:
        """Fills ``sample``: tokens, mask, log-probs, versions, routes, response, status, and where the turns are
        (metadata).

        Raises:
            NotAppended: the sample holds tokens already that are not those with which this transcript begins.
        """
        if sample.tokens != self._tokens[: len(sample.tokens)]:
            raise NotAppended(
                f"{sample.name}: its {len(sample.tokens)} tokens are not the first of the {len(self._tokens)} of this "
                "transcript"
            )
        sample.tokens = list(self._tokens)
        sample.response_length = self.response_length
        sample.response = response
        sample.loss_mask = list(self._mask)
        sample.rollout_log_probs = list(self._log_probs)
        sample.weight_versions = self._known_versions()
        sample.rollout_routed_experts = whole(self._routes)
        sample.status = status
        begin = self._prompt_length
        known = multi_turn_of(sample.metadata)
        turns = [[where.start - begin, where.stop - begin] for where in self._turns]
        sample.metadata = {**sample.metadata, METADATA_KEY: {**known, "turns": turns}}

    def _append(
        self, ids: list[int], bit: int, log_probs: Sequence[float], versions: Sequence[WeightVersion | None]
    ) -> None:
        self._tokens += ids
        self._mask += [bit] * len(ids)
        self._log_probs += log_probs
        self._versions += versions

    def _known_versions(self) -> list[WeightVersion]:
        """[T], or none where nothing was sampled. What was said before the first sampled token has its version."""
        first = next((version for version in self._versions if version is not None), None)
        return [] if first is None else [first if version is None else version for version in self._versions]


def final_answer(sample: Sample) -> str:
    """What the model said in the last turn, without reasoning and calls; of another sample its response. For graders: a
    right answer that stands in the result of a tool is not the model's."""
    answer: str | None = multi_turn_of(sample.metadata).get("answer", sample.response)
    return answer or ""


def marked(sample: Sample, tokenizer: Any) -> str:
    """The whole text of a sample, for people: what is trained stands between ⟦ and ⟧, special tokens as they are."""
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    owned = zip([0] * sample.prompt_length + mask, sample.tokens, strict=True)
    text = ""
    for bit, run in itertools.groupby(owned, key=lambda pair: pair[0]):
        written = tokenizer.decode(
            [token for _, token in run], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        text += f"⟦{written}⟧" if bit else written
    return text


def _checked_ids(token_ids: Sequence[int], what: str) -> list[int]:
    ids = list(token_ids)
    wrong = next((each for each in ids if not isinstance(each, int) or each < 0), None)
    if wrong is not None:
        raise NotAppended(f"{what} must be token ids, not {wrong!r}")
    return ids


def _turns_of(metadata: Mapping[str, Any], mask: Sequence[int], begin: int) -> list[range]:
    """As ``write`` noted them; else the trained runs. (Masks alone do not tell: trained tokens may be masked later.)"""
    noted = multi_turn_of(metadata).get("turns")
    if noted is not None:
        return [range(begin + start, begin + stop) for start, stop in noted]
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return [range(begin + start, begin + stop) for start, stop in zip(edges[0::2], edges[1::2], strict=True)]
