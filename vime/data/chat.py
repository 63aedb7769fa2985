"""From a row's prompt to text and token ids.

Two steps, because hooks see what is between them. ``render`` makes of a row's prompt what ``Sample.prompt`` holds: with
the chat template on, the finished text (a string prompt is one user message), else the prompt as it stands in the file.
``encode`` makes token ids of a ``Sample.prompt``. A finished text already has its special tokens, so none are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from vime.data.jsonl import NEEDS_TEMPLATE, half_character
from vime.errors import UserError
from vime.types import Message

_BATCH = 1024


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of transformers.
        kwargs: further arguments of the template, e.g. ``{"enable_thinking": false}``.
        tool_key: where the metadata hold the tool definitions for the template.
    """

    def __init__(self, tokenizer: Any, *, kwargs: Mapping[str, Any] | None = None, tool_key: str = "tools") -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._tool_key = tool_key

    def __str__(self) -> str:
        """How messages name it."""
        return f"the chat template of {getattr(self._tokenizer, 'name_or_path', '') or 'the tokenizer'}"

    @property
    def exists(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, messages: list[Message], metadata: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        """The text of these messages, without ``step_loss_mask``; arguments of tool calls that are JSON become objects.

        Raises:
            UserError: the template refuses the messages.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=self._tools(metadata),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
        except Exception as error:  # templates raise what they like
            raise UserError(f"the chat template refuses the prompt: {type(error).__name__}: {error}") from error
        return text

    def _tools(self, metadata: Mapping[str, Any]) -> Any:
        tools = metadata.get(self._tool_key)
        return json.loads(tools) if isinstance(tools, str) else tools


def _for_template(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if key != "step_loss_mask"}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_with_objects(call) for call in kept["tool_calls"]]
    return kept


def _with_objects(call: Any) -> Any:
    """Templates write arguments as JSON; a text that is JSON already would be quoted once more."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        function = {**function, "arguments": json.loads(function["arguments"])}
    except ValueError:
        return call
    return {**call, "function": function} if "function" in call else function


class PromptEncoder:
    """Renders and tokenizes prompts.

    Args:
        tokenizer: of transformers.
        apply_chat_template: ``--apply-chat-template``.
        template_kwargs: further arguments of the template, e.g. ``{"enable_thinking": false}``.
        tool_key: where the metadata hold the tool definitions for the template.

    Raises:
        UserError: the template is wanted, but the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_key: str = "tools",
    ) -> None:
        self._template = ChatTemplate(tokenizer, kwargs=template_kwargs, tool_key=tool_key)
        if apply_chat_template and not self._template.exists:
            raise UserError("--apply-chat-template: the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._apply = apply_chat_template

    def render(self, prompt: str | list[Message], metadata: Mapping[str, Any]) -> str | list[Message]:
        """What ``Sample.prompt`` holds for a row.

        Raises:
            UserError: the template refuses the messages.
        """
        return self._rendered(prompt, metadata) if self._apply else prompt

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a ``Sample.prompt``.

        Raises:
            UserError: it is a list of messages and there is no template to render it with.
        """
        if not isinstance(prompt, str):
            if not self._apply:
                raise UserError(NEEDS_TEMPLATE)
            prompt = self._rendered(prompt, {})
        return next(self._tokenized([prompt]))

    def lengths(self, prompts: Iterable[tuple[str | list[Message], Mapping[str, Any]]]) -> Iterator[int]:
        """Tokens of each (row's prompt, metadata).

        A list of messages that stays a list is measured through the tokenizer's template where it has one, else as 0.
        """
        texts = (self._measurable(prompt, metadata) for prompt, metadata in prompts)
        while batch := list(islice(texts, _BATCH)):
            yield from (len(ids) for ids in self._tokenized(batch))

    def _measurable(self, prompt: str | list[Message], metadata: Mapping[str, Any]) -> str:
        if self._apply or (not isinstance(prompt, str) and self._template.exists):
            return self._rendered(prompt, metadata)
        return prompt if isinstance(prompt, str) else ""

    def _rendered(self, prompt: str | list[Message], metadata: Mapping[str, Any]) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._template.render(messages, metadata, add_generation_prompt=True)

    def _tokenized(self, texts: list[str]) -> Iterator[list[int]]:
        try:
            encoded = self._tokenizer(texts, add_special_tokens=not self._apply, verbose=False)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                half = half_character(text)
                if half is not None:
                    raise UserError(f"the prompt {text[:40]!r} holds {half}, which is half of a character") from None
            raise
        return iter(encoded["input_ids"])
