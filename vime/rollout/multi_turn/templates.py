"""What stands between two turns of the model, as token ids to append.

A chat template renders whole dialogues, and some render earlier turns otherwise than they were sampled (reasoning is
taken out, white space trimmed). So no dialogue is ever rendered here: messages are rendered behind a probe, a question
and an answer of ours, and only what stands behind that answer is used. It has three parts,

    the end of the model's turn · the messages · the generation prompt of the next turn

of which the first is left out as far as the model has sampled it itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vime.data.chat import ChatTemplate
from vime.errors import UserError
from vime.types import Message

__all__ = ["TurnTemplate"]

QUESTION: Message = {"role": "user", "content": "Is this a probe?"}
ANSWER = "VimeProbeAnswer"
RESULT: Message = {"role": "tool", "name": "probe", "tool_call_id": "vimeprobe", "content": "VimeProbeResult"}
OPENER = "<think>"
OTHER_ENDS = ("<|eom_id|>",)
"""Tokens that end a turn in place of the one that the template writes: Llama 3's, after a call."""


class TurnTemplate:
    """How dialogues go on after a turn of the model.

    Args:
        tokenizer: of transformers.
        kwargs: further arguments of its chat template, e.g. ``{"enable_thinking": false}``.

    Attributes:
        tool_role: as whom tools speak: "user" where the template has no messages of tools.

    Raises:
        UserError: there is no chat template, it does not show the answer of an assistant, or it ends answers with
            something else than a special token.
    """

    def __init__(self, tokenizer: Any, *, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, kwargs=kwargs)
        if not self._template.exists:
            raise UserError("multi-turn generation needs a chat template, and the tokenizer has none")
        self._marks = frozenset(tokenizer.added_tokens_decoder) | frozenset(tokenizer.all_special_ids)
        self._others = frozenset(tokenizer.get_vocab()[name] for name in OTHER_ENDS if name in tokenizer.get_vocab())
        self._close = self._behind_answer([], add_generation_prompt=False)
        if self._close.strip() and self._end_in(self._encode(self._close)) is None:
            raise UserError(
                f"{self._template} ends an answer with {self._close!r}, which does not begin with a special token of "
                "the tokenizer: an answer that the model ended itself would be ended twice"
            )
        self.tool_role: Literal["tool", "user"] = "tool" if self._shows_tool_messages() else "user"
        self._ends = self._end_tokens()
        asks = self._behind_answer([QUESTION], add_generation_prompt=True)
        self._opener = OPENER if asks.rstrip().endswith(OPENER) else ""

    @property
    def close(self) -> str:
        """What the template writes behind an answer; empty where the next message ends it."""
        return self._close

    def between(self, turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The token ids that follow a turn of the model and lead to its next one.

        A turn that ended with the template's end token is not ended twice; one that was cut off is ended here.

        Args:
            turn: the token ids that the model sampled.
            messages: what the environment says: results of tools, or the user's next message.

        Raises:
            UserError: the template refuses the messages, or does not end turns as it did for the probe.
        """
        return self.encoded_behind(turn, self.text_between(messages))

    def text_between(self, messages: Sequence[Message]) -> str:
        """What the template writes behind a turn, its end included, up to the next one. Raises as ``between``."""
        text = self._behind_answer(self._spoken(messages), add_generation_prompt=True)
        if not text.startswith(self._close):
            raise UserError(
                f"{self._template} ends an answer with {self._close!r} when nothing follows and with "
                f"{text[: len(self._close)]!r} before a message of role {messages[0]['role']!r}"
            )
        return text

    def encoded_behind(self, turn: Sequence[int], text: str) -> list[int]:
        """The token ids of a ``text_between``, without the end of a turn that has it already."""
        ids = self._encode(text)
        end = self._end_in(ids)
        if end is None or not turn:
            return ids
        others = self._others if self._close.strip() else frozenset()
        return ids[end + 1 :] if turn[-1] == ids[end] or turn[-1] in others else ids

    def text(self, turn: Sequence[int]) -> str:
        """What the model said in a turn, with the special tokens that may mark calls, without the one that ends it.

        It begins with ``<think>`` where the generation prompt ends so: what follows is reasoning also where it is cut
        off.
        """
        body = turn[:-1] if turn and turn[-1] in self._ends else turn
        text: str = self._tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._opener + text

    def _spoken(self, messages: Sequence[Message]) -> list[Message]:
        """With results of tools as the template has them: where the user says them, all in one message, because such
        templates often want roles to alternate."""
        if self.tool_role == "tool":
            return list(messages)
        spoken: list[Message] = []
        for is_tool, run in itertools.groupby(messages, lambda message: message["role"] == "tool"):
            group = list(run)
            spoken += [{"role": "user", "content": "\n".join(each["content"] for each in group)}] if is_tool else group
        return spoken

    def _behind_answer(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        probe = [QUESTION, {"role": "assistant", "content": ANSWER}, *messages]
        text = self._template.render(probe, {}, add_generation_prompt=add_generation_prompt)
        _, found, behind = text.partition(ANSWER)
        if not found:
            raise UserError(f"{self._template} does not show what an assistant answers")
        return behind

    def _end_tokens(self) -> frozenset[int]:
        """The tokens that are no part of what a turn says when it ends with one of them."""
        following = [self.between((), [message]) for message in (RESULT, QUESTION)]
        found = [(ids, self._end_in(ids)) for ids in following]
        eos = {self._tokenizer.eos_token_id} - {None}
        return frozenset({ids[end] for ids, end in found if end is not None} | eos) | self._others

    def _end_in(self, following: Sequence[int]) -> int | None:
        """Where the token that ends a turn stands in what follows the turn: first, or behind white space, which models
        do not write before it as some templates do."""
        for position, token in enumerate(following):
            if self._tokenizer.decode([token], skip_special_tokens=False).strip():
                return position if token in self._marks else None
        return None

    def _shows_tool_messages(self) -> bool:
        try:
            return RESULT["content"] in self._behind_answer([RESULT], add_generation_prompt=True)
        except UserError:
            return False

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
