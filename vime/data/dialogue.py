"""From a dialogue to token ids and the mask that says which of them are trained.

What the model learns is what it will have to say: a turn is trained in the context in which the chat template asks for
it, and on the tokens that follow there. So for an assistant's message i of a dialogue m two renderings count,

    context(i) = template(m[:i], add_generation_prompt=True)      turn(i) = template(m[:i+1]) without context(i)

and a dialogue is one text whose trained parts are turns, each right after its own context. Where a template has it
otherwise, the row is refused and says so; nothing is trained that the template would never ask for:

* context(i) must be how template(m[:i+1]) begins. (Templates that open a reasoning block in the generation prompt, and
  leave reasoning out of messages, break this. "distill_qwen" is for them.)
* template(m[:i+1]) must be how the whole text begins. Templates of reasoning models break this: they remove reasoning
  from a turn once later questions follow. "qwen3" trains such a turn in a sample of its own, which ends with it.

A turn is trained up to its end-of-turn token, and not the white space that a template puts after it. Where the template
ends turns with the token that begins the next message, that token is trained; where nothing ends the last turn, the
tokenizer's end-of-text token is added.

Contexts and turns are tokenized one by one, as they are while answers are sampled. So no token lies across a boundary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.data.chat import ChatTemplate
from vime.errors import UserError
from vime.types import Message

__all__ = ["MASK_TYPES", "Dialogue", "DialogueEncoder", "Untrained", "dialogue_of"]

MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
OPENER = "<think>\n"
"""How a generation prompt ends that opens a reasoning block."""


class Untrained(UserError):
    """Every turn of a dialogue has step_loss_mask 0."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Token ids and which of them are trained; the last one is."""

    token_ids: list[int]  # [L]
    mask: list[int]  # [L] 1 = trained

    @property
    def response_length(self) -> int:
        """Tokens from the first trained one on."""
        return len(self.mask) - self.mask.index(1)


def dialogue_of(prompt: str | list[Message], label: str | None) -> list[Message]:
    """The messages of a row. A text is one question; a label answers a dialogue that does not end with an answer.

    Raises:
        UserError: there is no answer to learn.
    """
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if label is not None and (not messages or messages[-1]["role"] != "assistant"):
        messages = [*messages, {"role": "assistant", "content": label}]
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("there is no message of the assistant to train on, and no label (--label-key) to use as one")
    return messages


class DialogueEncoder:
    """Masks dialogues for one tokenizer.

    Args:
        tokenizer: of transformers.
        mask_type: ``--loss-mask-type``.
        template_kwargs: further arguments of the template.
        tool_key: where the metadata hold the tool definitions for the template.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        mask_type: str = "qwen",
        template_kwargs: Mapping[str, Any] | None = None,
        tool_key: str = "tools",
    ) -> None:
        assert mask_type in MASK_TYPES, mask_type
        self._template = ChatTemplate(tokenizer, kwargs=template_kwargs, tool_key=tool_key)
        if not self._template.exists:
            raise UserError("--loss-type sft_loss: the tokenizer has no chat template, which says how dialogues look")
        self._tokenizer = tokenizer
        self._mask_type = mask_type
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def parts(self, messages: list[Message], metadata: Mapping[str, Any]) -> list[list[Message]]:
        """The dialogues to ``encode`` for this one: itself, or one for each set of turns that stand in one text.

        Raises:
            UserError: the template refuses the messages, or there is nothing that an answer could be to.
            Untrained: no turn is to be trained.
        """
        turns = self._turns(messages)
        if self._mask_type not in ("qwen3", "qwen3_5"):
            return [messages]
        whole = {i: self._render(messages[: i + 1], metadata) for i in turns}
        found = []
        while turns:
            last = turns[-1]
            kept = [i for i in turns if whole[last].startswith(whole[i])]
            turns = [i for i in turns if i not in kept]
            found.append(_only(messages[: last + 1], kept))
        return found[::-1]

    def encode(self, messages: list[Message], metadata: Mapping[str, Any]) -> Dialogue:
        """Token ids and mask of one dialogue of ``parts``, up to its last trained token.

        Raises:
            UserError: the template refuses the messages, or breaks one of the conditions above; it says which message.
            Untrained: no turn is to be trained.
        """
        turns = self._turns(messages)
        if self._mask_type == "distill_qwen":
            return self._after_generation_prompt(messages, metadata)
        messages = messages[: turns[-1] + 1]
        text = self._render(messages, metadata)
        cuts = [0, *(cut for i in turns for cut in self._span(messages, i, text, metadata))]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        *encoded, whole = self._tokenized([*pieces, text])
        self._check_pieces(encoded, whole)
        return self._masked(encoded)

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        """Positions of the messages that are trained."""
        turns = [i for i, each in enumerate(messages) if each["role"] == "assistant" and each.get("step_loss_mask", 1)]
        if self._mask_type == "distill_qwen":
            if messages[-1]["role"] != "assistant":
                raise UserError(
                    "the dialogue does not end with an answer, which is all that --loss-mask-type distill_qwen trains"
                )
            turns = [i for i in turns if i == len(messages) - 1]
        if not turns:
            raise Untrained("no message is trained: step_loss_mask is 0 at all that could be")
        if turns[0] == 0:
            raise UserError("message 1: the answer has no context to be trained in; step_loss_mask 0 leaves it out")
        return turns

    def _span(self, messages: list[Message], turn: int, text: str, metadata: Mapping[str, Any]) -> tuple[int, int]:
        """Where a turn begins and ends in the text of the dialogue."""
        context = self._render(messages[:turn], metadata, add_generation_prompt=True)
        whole = text if turn + 1 == len(messages) else self._render(messages[: turn + 1], metadata)
        if not whole.startswith(context):
            raise UserError(
                f"message {turn + 1}: {self._template} writes an answer otherwise than it asks for one (it asks with "
                f"{_end(context)}); --loss-mask-type distill_qwen trains the last answer as it stands"
            )
        if not text.startswith(whole):
            raise UserError(
                f"message {turn + 1}: {self._template} changes this turn once later messages follow (reasoning is "
                "removed?); --loss-mask-type qwen3 trains it in a sample of its own, step_loss_mask 0 leaves it out"
            )
        return len(context), len(whole)

    def _after_generation_prompt(self, messages: list[Message], metadata: Mapping[str, Any]) -> Dialogue:
        """The last message as a text right after the generation prompt, and the end-of-text token."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise UserError(f"message {len(messages)}: --loss-mask-type distill_qwen needs content that is a text")
        context = self._render(messages[:-1], metadata, add_generation_prompt=True)
        if context.endswith(OPENER):  # the model goes on from there
            content = content.removeprefix(OPENER)
        prompt, answer = self._tokenized([context, content])
        answer.append(self._end_of_text())
        return Dialogue(prompt + answer, [0] * len(prompt) + [1] * len(answer))

    def _masked(self, pieces: list[list[int]]) -> Dialogue:
        """``pieces``: contexts and turns by turns; the last one is a turn."""
        ends = list(itertools.accumulate(len(piece) for piece in pieces))
        ids = [token for piece in pieces for token in piece]
        mask = [0] * len(ids)
        for start, end in zip(ends[0::2], ends[1::2], strict=True):
            stop = self._end_of_turn(ids, start, end)
            mask[start:stop] = [1] * (stop - start)
        if len(mask) > len(ids):  # nothing ends the last turn
            ids.append(self._end_of_text())
        end = len(mask) - mask[::-1].index(1)
        return Dialogue(ids[:end], mask[:end])

    def _end_of_turn(self, ids: list[int], start: int, end: int) -> int:
        """Behind the token that ends a turn: the turn's own, or the special one that follows it."""
        own = next((i for i in reversed(range(start, end)) if ids[i] in self._special), None)
        if own is not None and not self._decode(ids[own + 1 : end]).strip():
            return own + 1
        return end + (end == len(ids) or ids[end] in self._special)

    def _check_pieces(self, pieces: list[list[int]], whole: list[int]) -> None:
        """Tokens of the pieces may be others than those of the whole (at boundaries), but say the same."""
        joined = [token for piece in pieces for token in piece]
        if joined != whole and self._decode(joined) != self._decode(whole):
            raise UserError(
                "the tokenizer reads the turns one by one otherwise than the whole dialogue: "
                f"{self._decode(joined)[:200]!r} instead of {self._decode(whole)[:200]!r}"
            )

    def _end_of_text(self) -> int:
        token: int | None = self._tokenizer.eos_token_id
        if token is None:
            raise UserError(f"{self._template} does not end turns, and the tokenizer has no end-of-text token")
        return token

    def _render(
        self, messages: list[Message], metadata: Mapping[str, Any], *, add_generation_prompt: bool = False
    ) -> str:
        return self._template.render(messages, metadata, add_generation_prompt=add_generation_prompt)

    def _tokenized(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _only(messages: list[Message], turns: list[int]) -> list[Message]:
    """The same messages, of which only those at ``turns`` are trained."""
    return [
        each if i in turns or each["role"] != "assistant" else {**each, "step_loss_mask": 0}
        for i, each in enumerate(messages)
    ]


def _end(text: str) -> str:
    return repr(text[-40:])
