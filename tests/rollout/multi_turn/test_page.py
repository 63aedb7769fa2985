"""The generate functions of docs/en/advanced/agents.md, against ``ScriptedGenerator``, a fake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import CHATML, tokenizer_with
from tests.rollout.multi_turn.scripted import ScriptedGenerator, turns
from vime.config import Args
from vime.rollout.multi_turn import Limits, marked
from vime.rollout.multi_turn.tool_calls import PARSERS
from vime.types import Sample

PAGE = (Path(__file__).parents[3] / "docs/en/advanced/agents.md").read_text(encoding="utf-8")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
PARAMS = {"max_tokens": 400, "temperature": 1.0, "stop": [], "stop_token_ids": [], "seed": 3}


@pytest.fixture
def args(tmp_path: Path) -> Args:
    tokenizer = tokenizer_with(CHATML)
    tokenizer.save_pretrained(tmp_path)
    values = {"hf_checkpoint": str(tmp_path), "trust_remote_code": False, "max_context_tokens": 2048}
    values |= {"apply_chat_template": False, "apply_chat_template_kwargs": {}, "rollout_skip_special_tokens": True}
    generator = ScriptedGenerator(tokenizer, turns(CALL, "It is 3.<|im_end|>"))
    return Args({**values, "tool_key": "tools", "generator": generator})


@pytest.mark.parametrize(("number", "said"), [(0, "tool\n3\n"), (1, "user\nAre you sure?\n")])
async def test_a_generate_function_of_the_page_plays_an_episode(args: Args, number: int, said: str) -> None:
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number], scope)
    sample = await scope["generate"](args, Sample(index=0, group_index=0, prompt="1 + 2?"), PARAMS)
    assert said in sample.response and sample.metadata["multi_turn"]["answer"] == "It is 3."


async def test_an_episode_looks_as_the_page_shows_it(args: Args) -> None:
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], scope)
    sample = await scope["generate"](args, Sample(index=0, group_index=0, prompt="1 + 2?"), PARAMS)
    (shown,) = re.findall(r"```\n(<\|im_start.*?)\n```", PAGE, re.DOTALL)
    assert marked(sample, tokenizer_with(CHATML)) == shown


def test_the_page_names_every_format_and_the_limits_as_they_are() -> None:
    assert all(f"| `{name}` |" in PAGE for name in PARSERS)
    values = {name: getattr(Limits(), name) for name in Limits.__slots__}
    fields = ", ".join(f"{name}={'None' if value is None else format(value, 'g')}" for name, value in values.items())
    assert f"`Limits({fields})`" in PAGE
