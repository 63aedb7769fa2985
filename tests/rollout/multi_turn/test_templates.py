"""What is appended between two turns, template by template, against dialogues that are written out by hand.

``[..]`` marks what the model sampled in the shown dialogues; all else comes from the prompt or from ``TurnTemplate``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.data.templates import CHATML, DISTILL, GLM, LLAMA2, LLAMA3, QWEN3, QWEN25, QWEN35, tokenizer_with
from vime.errors import UserError
from vime.rollout.multi_turn.templates import TurnTemplate
from vime.rollout.multi_turn.tool_calls import hermes
from vime.rollout.multi_turn.transcript import Transcript
from vime.types import Generation, Message, Sample, Status


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def episode(template: str, turns: list[str], said: list[list[Message]], **kwargs: Any) -> tuple[str, str]:
    """Plays an episode whose turns are given, and returns it twice: its whole text, and what is trained of it."""
    tokenizer = tokenizer_with(template)
    between = TurnTemplate(tokenizer, kwargs=kwargs)
    prompt = tokenizer.apply_chat_template([user("1 + 1?")], tokenize=False, add_generation_prompt=True, **kwargs)
    transcript = Transcript(encoded(tokenizer, prompt))
    for turn, messages in zip(turns, [*said, []], strict=True):
        ids = encoded(tokenizer, turn)
        numbers = [-1.0] * len(ids)
        answer = Generation(token_ids=ids, log_probs=numbers, weight_versions=[1] * len(ids), finish_reason="stop")
        transcript.sampled(answer, transcript.tokens)
        if messages:
            transcript.said(between.between(ids, messages))
    sample = Sample(index=0)
    transcript.write(sample, status=Status.COMPLETED, response="")
    masked = zip(sample.tokens[sample.prompt_length :], sample.loss_mask or (), strict=True)
    return tokenizer.decode(sample.tokens), tokenizer.decode([token for token, bit in masked if bit])


CHATML_EPISODE = (
    "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n[I ask.<|im_end|>]\n"
    "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>assistant\n[It is 2.<|im_end|>]\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[Yes.<|im_end|>]"
)
QWEN25_EPISODE = (
    "<|im_start|>system\nYou help.<|im_end|>\n"
    "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n[I ask.<|im_end|>]\n"
    "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n[It is 2.<|im_end|>]\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[Yes.<|im_end|>]"
)
QWEN3_EPISODE = (
    "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    "[<think>\nhm\n</think>\n\nI ask.<|im_end|>]\n"
    "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n[<think>\nso\n</think>\n\nIt is 2.<|im_end|>]\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n[<think>\nwell\n</think>\n\nYes.<|im_end|>]"
)
LLAMA3_EPISODE = (
    "<|begin|><|head|>user<|/head|>\n\n1 + 1?<|eot|><|head|>assistant<|/head|>\n\n[I ask.<|eot|>]"
    "<|head|>tool<|/head|>\n\n2<|eot|><|head|>tool<|/head|>\n\ntwo<|eot|><|head|>assistant<|/head|>\n\n"
    "[It is 2.<|eot|>]<|head|>user<|/head|>\n\nSure?<|eot|><|head|>assistant<|/head|>\n\n[Yes.<|eot|>]"
)
LLAMA2_EPISODE = (
    "<|begin|><|head|> 1 + 1? <|/head|>[ I ask.<|endoftext|>]<|begin|><|head|> 2\ntwo <|/head|>"
    "[ It is 2.<|endoftext|>]<|begin|><|head|> Sure? <|/head|>[ Yes.<|endoftext|>]"
)
GLM_EPISODE = (
    "<|user|>\n1 + 1?<|assistant|>\n[I ask.<|observation|>]\n2<|observation|>\ntwo<|assistant|>\n"
    "[It is 2.<|user|>]\nSure?<|assistant|>\n[Yes.<|user|>]"
)
DISTILL_EPISODE = (
    "<|user|>1 + 1?<|assistant|><think>\n[hm</think>I ask.<|endoftext|>]"
    "<|user|>2<|user|>two<|assistant|><think>\n[so</think>It is 2.<|endoftext|>]"
    "<|user|>Sure?<|assistant|><think>\n[well</think>Yes.<|endoftext|>]"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(CHATML, CHATML_EPISODE, id="SmolLM2"),
        pytest.param(QWEN25, QWEN25_EPISODE, id="Qwen2.5"),
        pytest.param(QWEN3, QWEN3_EPISODE, id="Qwen3"),
        pytest.param(LLAMA2, LLAMA2_EPISODE, id="Llama 2"),
        pytest.param(LLAMA3, LLAMA3_EPISODE, id="Llama 3"),
        pytest.param(GLM, GLM_EPISODE, id="GLM"),
        pytest.param(DISTILL, DISTILL_EPISODE, id="R1 distilled"),
    ],
)
def test_the_model_s_turns_are_trained_with_their_ends_and_nothing_else_is(template: str, expected: str) -> None:
    turns = re.findall(r"\[(.*?)\]", expected, re.DOTALL)
    whole, trained = episode(template, turns, [[tool("2"), tool("two")], [user("Sure?")]])
    assert whole == re.sub(r"[\[\]]", "", expected)
    assert trained == "".join(turns)


def test_reasoning_stays_where_it_was_sampled_although_the_template_would_take_it_out() -> None:
    turns = re.findall(r"\[(.*?)\]", QWEN3_EPISODE, re.DOTALL)
    whole, _ = episode(QWEN3, turns, [[tool("2")], [user("Sure?")]])
    assert whole.count("<think>") == 3
    answers = [{"role": "assistant", "content": turn.removesuffix("<|im_end|>")} for turn in turns]
    dialogue = [user("1 + 1?"), answers[0], tool("2"), answers[1], user("Sure?"), answers[2]]
    assert tokenizer_with(QWEN3).apply_chat_template(dialogue, tokenize=False).count("<think>") == 1


@pytest.mark.parametrize(
    ("template", "kwargs", "asks"),
    [
        (QWEN3, {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (QWEN35, {}, "<|im_start|>assistant\n<think>\n"),
    ],
)
def test_each_turn_is_asked_for_as_the_first_one_is(template: str, kwargs: dict[str, Any], asks: str) -> None:
    whole, trained = episode(template, ["I ask.<|im_end|>", "2.<|im_end|>"], [[tool("2")]], **kwargs)
    assert whole.count(asks) == 2
    assert trained == "I ask.<|im_end|>2.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "turn", "expected"),
    [
        (QWEN25, "cut", "cut<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA3, "cut", "cut<|eot|><|head|>user<|/head|>\n\nGo on.<|eot|><|head|>assistant<|/head|>\n\n"),
        (LLAMA2, " cut", " cut <|endoftext|><|begin|><|head|> Go on. <|/head|>"),
        (GLM, "cut", "cut<|user|>\nGo on.<|assistant|>\n"),
        # the end of a text is not the end of a turn
        (
            QWEN25,
            "cut<|endoftext|>",
            "cut<|endoftext|><|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_turn_that_was_cut_off_is_ended_by_the_environment(template: str, turn: str, expected: str) -> None:
    tokenizer = tokenizer_with(template)
    ids = encoded(tokenizer, turn)
    assert tokenizer.decode(ids + TurnTemplate(tokenizer).between(ids, [user("Go on.")])) == expected


def test_a_turn_can_end_with_another_token_than_the_template_writes() -> None:
    """Llama 3 ends a call with a token of its own; the one of a usual turn is not written behind it."""
    tokenizer = tokenizer_with(LLAMA3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    template = TurnTemplate(tokenizer)
    ids = encoded(tokenizer, "call<|eom_id|>")
    assert tokenizer.decode(template.between(ids, [tool("2")])).startswith("<|head|>tool<|/head|>")
    assert template.text(ids) == "call"


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", ""])
def test_the_text_of_a_turn_is_without_its_end(end: str) -> None:
    tokenizer = tokenizer_with(QWEN25)
    assert TurnTemplate(tokenizer).text(encoded(tokenizer, f"It is <|head|> 2.{end}")) == "It is <|head|> 2."


@pytest.mark.parametrize(("template", "begin"), [(QWEN3, ""), (QWEN35, "<think>"), (DISTILL, "<think>")])
def test_what_follows_an_open_reasoning_block_is_known_as_reasoning(template: str, begin: str) -> None:
    """Else a call that the model only thought of would be made when its reasoning is cut off."""
    tokenizer = tokenizer_with(template)
    text = TurnTemplate(tokenizer).text(encoded(tokenizer, 'or <tool_call>{"name": "add"}</tool_call>'))
    assert text == begin + 'or <tool_call>{"name": "add"}</tool_call>'
    assert len(hermes(text).calls) == (0 if begin else 1)


NO_TOOLS = (
    "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
REFUSES = NO_TOOLS.replace(
    "{%- endif %}{%- endfor %}", "{%- else %}{{ raise_exception('no') }}{%- endif %}{%- endfor %}"
)


@pytest.mark.parametrize("template", [NO_TOOLS, REFUSES])
def test_where_a_template_has_no_messages_of_tools_they_speak_as_the_user(template: str) -> None:
    tokenizer = tokenizer_with(template)
    found = TurnTemplate(tokenizer)
    assert found.tool_role == "user"
    ids = encoded(tokenizer, "I ask.<|eot|>")
    assert tokenizer.decode(found.between(ids, [tool("2")])) == "<|user|>2<|eot|><|assistant|>"


ALTERNATES = NO_TOOLS.replace(
    "{%- for m in messages %}",
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}",
)


def test_results_of_several_calls_are_one_message_of_the_user() -> None:
    tokenizer = tokenizer_with(ALTERNATES)
    ids = encoded(tokenizer, "I ask.<|eot|>")
    said = TurnTemplate(tokenizer).between(ids, [tool("2"), tool("two")])
    assert tokenizer.decode(said) == "<|user|>2\ntwo<|eot|><|assistant|>"


def test_a_template_that_ends_turns_otherwise_before_some_messages_is_refused() -> None:
    odd = CHATML.replace("m['content'] + '<|im_end|>", "m['content'] + ('<|eot|>' if loop.last else '<|im_end|>') + '")
    with pytest.raises(UserError, match=r"ends an answer with '<\|eot\|>\\n' when nothing follows and with"):
        TurnTemplate(tokenizer_with(odd))


@pytest.mark.parametrize("end", ["</turn>", "\n[END]<|im_end|>"])
def test_a_template_whose_ends_the_model_may_have_written_already_is_refused(end: str) -> None:
    """As texts of several tokens, they would stand there twice."""
    with pytest.raises(UserError, match="which does not begin with a special token of the tokenizer"):
        TurnTemplate(tokenizer_with(CHATML.replace("<|im_end|>", end.replace("\n", "\\n"))))


def test_templates_that_cannot_be_used_say_so() -> None:
    with pytest.raises(UserError, match="the tokenizer has none"):
        TurnTemplate(tokenizer_with(""))
    with pytest.raises(UserError, match="does not show what an assistant answers"):
        TurnTemplate(tokenizer_with("{{ messages[0].content }}"))
