"""Chat templates that behave as those of public models in what matters to masks, written for these tests."""

from __future__ import annotations

from typing import Any

from tests.tiny import CHAT_TEMPLATE, make_tokenizer

SPECIALS = ["<|user|>", "<|assistant|>", "<|observation|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]

QWEN25 = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}"
    "{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}"
    "{{ '<|im_start|>' + m.role }}{%- if m.content %}{{ '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' '
    "+ (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""A system message of its own where there is none; consecutive tool messages in one user turn; tool calls as JSON."""

QWEN3 = (
    "{%- set ns = namespace(query=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set parts = m.content.split('</think>') %}"
    "{%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}"
    "{%- set answer = parts[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.query and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{ answer + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Reasoning is left out of the turns before the last question; the last turn always has a reasoning block."""

QWEN35 = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}{%- if enable_thinking is defined",
)
"""The same, and the generation prompt opens the reasoning block."""

LLAMA3 = (
    "{{ '<|begin|>' }}{%- for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"
)
"""Nothing follows the end-of-turn token."""

LLAMA2 = (
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|begin|><|head|> ' + m.content | trim + ' <|/head|>' }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{%- else %}{{ raise_exception('only users and assistants') }}{%- endif %}{%- endfor %}"
)
"""White space before the end-of-turn token, which models do not write; no messages of tools, no generation prompt."""

DISTILL = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|endoftext|>' }}"
    "{%- else %}{{ '<|user|>' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{%- endif %}"
)
"""Asks for reasoning, and leaves it out of every message."""

GLM = (
    "{%- for m in messages %}"
    "{{ ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\\n' + m.content }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{%- endif %}"
)
"""A turn ends where the next message begins."""

CHATML = CHAT_TEMPLATE
"""SmolLM2's, without its own system message."""


def tokenizer_with(template: str) -> Any:
    """The tiny tokenizer with that template and the special tokens that these templates use."""
    base = make_tokenizer()
    tokenizer = type(base)(
        tokenizer_object=type(base.backend_tokenizer).from_str(base.backend_tokenizer.to_str()),
        eos_token="<|endoftext|>",
        chat_template=template,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIALS, "<|im_start|>", "<|im_end|>"]})
    return tokenizer
