"""Prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vime.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which prompts are read, and how a row becomes a prompt."""

    prompt_data: str | None = flag(None, help="A .jsonl file of prompts; FILE@[a:b] takes rows a to b-1.")
    input_key: str = flag("input", help="Key of a row that holds the prompt: a text or a list of messages.")
    label_key: str | None = flag(None, help="Key of a row that holds the right answer.")
    metadata_key: str = flag("metadata", help="Key of a row that holds further data for custom functions.")
    tool_key: str = flag("tools", help="Key of the metadata that holds the tool definitions for the chat template.")
    apply_chat_template: bool = flag(False, help="Render prompts through the tokenizer's chat template.")
    apply_chat_template_kwargs: Mapping[str, Any] = flag({}, help="Further arguments of the chat template, as JSON.")
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "qwen",
        help="Which turns of a dialogue sft_loss trains. qwen: every assistant turn, for templates that never change "
        "a turn afterwards. qwen3 and qwen3_5: a turn that is changed (its reasoning removed) by later ones is trained "
        "in a sample of its own. distill_qwen: the last turn, as text after the generation prompt.",
    )
    rollout_shuffle: bool = flag(False, help="Shuffle the prompts anew in each epoch, by --rollout-seed + epoch.")
    rollout_seed: int = flag(42, help="Seed of shuffling and sampling.")
    rollout_max_prompt_len: int | None = flag(None, help="Longer prompts (in tokens) are dropped, with a count.")
    skip_bad_rows: bool = flag(
        False, help="Skip and count rows which cannot be read, instead of stopping at the first."
    )
