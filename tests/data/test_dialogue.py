"""Which tokens of a dialogue are trained, for templates that behave as those of public models.

``shown`` writes the trained runs of tokens between ⟦ and ⟧.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.templates import CHATML, DISTILL, GLM, LLAMA3, QWEN3, QWEN25, QWEN35, tokenizer_with
from vime.data.dialogue import Dialogue, DialogueEncoder, Untrained, dialogue_of
from vime.errors import UserError


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


TWO_TURNS = [user("1 + 1?"), answer("2"), user("2 + 2?"), answer("4")]
THOUGHTS = [
    user("1 + 1?"),
    answer("<think>\none\n</think>\n\n2"),
    user("2 + 2?"),
    answer("<think>\ntwo\n</think>\n\n4"),
]
CALLS = [
    user("1 + 1?"),
    answer("<think>\nask\n</think>\n\ncall"),
    tool("2"),
    tool("two"),
    answer("<think>\nseen\n</think>\n\n2"),
]


def shown(template: str, messages: list[dict[str, Any]], mask_type: str = "qwen", **options: Any) -> list[str]:
    """What is trained of each sample of a dialogue."""
    tokenizer = tokenizer_with(template)
    encoder = DialogueEncoder(tokenizer, mask_type=mask_type, **options)
    return [
        written(tokenizer, encoder.encode(part, {})) for part in encoder.parts(messages, options.get("metadata", {}))
    ]


def written(tokenizer: Any, dialogue: Dialogue) -> str:
    text, trained = "", 0
    for token, bit in zip(dialogue.token_ids, dialogue.mask, strict=True):
        text += "" if bit == trained else "⟦" if bit else "⟧"
        text, trained = text + tokenizer.decode([token]), bit
    return text + ("⟧" if trained else "")


def test_every_answer_is_trained_with_its_end_of_turn_and_without_the_line_break_behind_it() -> None:
    assert shown(CHATML, TWO_TURNS) == [
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧"
    ]


def test_the_tokens_are_those_of_the_template() -> None:
    tokenizer = tokenizer_with(CHATML)
    dialogue = DialogueEncoder(tokenizer).encode(TWO_TURNS, {})
    whole = tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)
    assert dialogue.token_ids == whole[:-1]  # nothing is trained behind the last end of turn
    prompt = tokenizer.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True, return_dict=False)
    assert dialogue.response_length == len(dialogue.token_ids) - len(prompt)


def test_a_system_message_that_the_template_adds_is_there_once_and_not_trained() -> None:
    (text,) = shown(QWEN25, TWO_TURNS)
    assert text.startswith("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n1 + 1?")
    assert text.count("You help.") == 1 and text.count("⟦") == 2


def test_llama_turns_end_without_anything_behind_them() -> None:
    assert shown(LLAMA3, TWO_TURNS) == [
        "<|begin|><|head|>user<|/head|>\n\n1 + 1?<|eot|><|head|>assistant<|/head|>\n\n⟦2<|eot|>⟧"
        "<|head|>user<|/head|>\n\n2 + 2?<|eot|><|head|>assistant<|/head|>\n\n⟦4<|eot|>⟧"
    ]


def test_calls_without_content_are_trained_and_consecutive_tool_messages_are_not() -> None:
    """Arguments that are JSON already are not quoted once more."""
    function = {"name": "add", "arguments": '{"a": 1, "b": 1}'}
    call = answer(None, tool_calls=[{"type": "function", "function": function}])
    (text,) = shown(QWEN25, [user("1 + 1?"), call, tool("2"), tool("two"), answer("2")])
    assert text.endswith(
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦2<|im_end|>⟧"
    )


def test_tools_of_the_row_are_in_the_prompt() -> None:
    encoder = DialogueEncoder(tokenizer_with(QWEN25))
    with_tools = encoder.encode(TWO_TURNS, {"tools": [{"name": "add"}]})
    assert len(with_tools.token_ids) > len(encoder.encode(TWO_TURNS, {}).token_ids)
    assert sum(with_tools.mask) == sum(encoder.encode(TWO_TURNS, {}).mask)


@pytest.mark.parametrize("turn", [1, 3])
def test_a_turn_with_step_loss_mask_0_is_context_only(turn: int) -> None:
    messages = [{**each, "step_loss_mask": 0} if i == turn else each for i, each in enumerate(TWO_TURNS)]
    (text,) = shown(CHATML, messages)
    trained = "⟦4<|im_end|>⟧" if turn == 1 else "⟦2<|im_end|>⟧"
    assert text.count("⟦") == 1 and text.endswith(trained)  # what follows the last trained turn is left out


def test_step_loss_mask_means_nothing_at_other_roles() -> None:
    marked = [{**each, "step_loss_mask": 1} for each in TWO_TURNS]
    unmarked = [{**each, "step_loss_mask": 0} if each["role"] == "user" else each for each in TWO_TURNS]
    assert shown(CHATML, marked) == shown(CHATML, unmarked) == shown(CHATML, TWO_TURNS)


@pytest.mark.parametrize("mask_type", ["qwen", "qwen3", "distill_qwen"])
def test_a_dialogue_without_any_trained_turn_is_told_apart(mask_type: str) -> None:
    masked = [{**each, "step_loss_mask": 0} for each in TWO_TURNS]
    with pytest.raises(Untrained, match="step_loss_mask is 0"):
        shown(CHATML, masked, mask_type)


@pytest.mark.parametrize("mask_type", ["qwen", "qwen3", "distill_qwen"])
def test_an_answer_to_nothing_is_refused_and_may_be_left_out(mask_type: str) -> None:
    with pytest.raises(UserError, match=r"message 1: the answer has no context .*; step_loss_mask 0 leaves it out"):
        shown(CHATML, [answer("Hello!")], mask_type)
    (text,) = shown(CHATML, [answer("Hello!", step_loss_mask=0), *TWO_TURNS], mask_type)
    assert "⟦Hello" not in text and text.endswith("⟧")


def test_a_dialogue_that_ends_with_a_question_has_no_last_answer_to_train() -> None:
    with pytest.raises(UserError, match=r"does not end with an answer, which is all that .* distill_qwen trains"):
        shown(DISTILL, TWO_TURNS[:3], "distill_qwen")
    assert len(shown(CHATML, TWO_TURNS[:3])) == 1


def test_reasoning_that_is_removed_later_is_refused_with_the_message_and_the_way_out() -> None:
    with pytest.raises(UserError, match=r"message 2: the chat template of the tokenizer changes this turn .* qwen3 "):
        shown(QWEN3, THOUGHTS)


def test_a_turn_whose_reasoning_is_removed_later_is_trained_in_a_sample_of_its_own() -> None:
    assert shown(QWEN3, THOUGHTS, "qwen3") == [
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\none\n</think>\n\n2<|im_end|>⟧",
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\ntwo\n</think>\n\n4<|im_end|>⟧",
    ]


def test_turns_that_keep_their_reasoning_stay_in_one_sample() -> None:
    """After the last question the template keeps it: a call, two results and the answer."""
    assert shown(QWEN3, CALLS, "qwen3") == [
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nask\n</think>\n\ncall<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nseen\n</think>\n\n2<|im_end|>⟧"
    ]
    assert shown(QWEN3, CALLS, "qwen3") == shown(QWEN3, CALLS)


def test_samples_of_one_dialogue_train_each_turn_once() -> None:
    messages = [*CALLS, *THOUGHTS, user("and?"), answer("no", step_loss_mask=0)]
    texts = shown(QWEN3, messages, "qwen3")
    assert [text.count("⟦") for text in texts] == [2, 1, 1]
    for thought in ("ask", "seen", "one", "two"):
        assert sum(text.count(f"⟦<think>\n{thought}") for text in texts) == 1


def test_without_thinking_the_empty_block_belongs_to_the_prompt() -> None:
    (text,) = shown(QWEN3, [user("1 + 1?"), answer("2")], template_kwargs={"enable_thinking": False})
    assert text.endswith("assistant\n<think>\n\n</think>\n\n⟦2<|im_end|>⟧")


def test_the_opener_of_reasoning_in_the_generation_prompt_is_not_trained() -> None:
    texts = shown(QWEN35, THOUGHTS, "qwen3_5")
    assert [text.rpartition("assistant\n")[2] for text in texts] == [
        "<think>\n⟦one\n</think>\n\n2<|im_end|>⟧",
        "<think>\n⟦two\n</think>\n\n4<|im_end|>⟧",
    ]


def test_a_template_that_asks_for_what_it_never_writes_is_refused() -> None:
    with pytest.raises(UserError, match=r"message 2: .* otherwise than it asks for one \(it asks with '.*<think>"):
        shown(DISTILL, THOUGHTS)


def test_distilled_answers_are_trained_as_text_behind_the_generation_prompt_the_last_one_only() -> None:
    assert shown(DISTILL, THOUGHTS, "distill_qwen") == [
        "<|user|>1 + 1?<|assistant|>\n\n2<|endoftext|><|user|>2 + 2?<|assistant|><think>\n"
        "⟦two\n</think>\n\n4<|endoftext|>⟧"
    ]


def test_where_the_next_message_ends_a_turn_its_first_token_is_trained() -> None:
    assert shown(GLM, [user("1 + 1?"), answer("call"), tool("2"), answer("2"), user("?"), answer("!")]) == [
        "<|user|>\n1 + 1?<|assistant|>\n⟦call<|observation|>⟧\n2<|assistant|>\n⟦2<|user|>⟧\n?<|assistant|>\n"
        "⟦!<|endoftext|>⟧"
    ]


def test_no_token_lies_across_the_boundary_of_a_turn() -> None:
    """The line break that ends the prompt and the one that begins the answer would share a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*"abu:", "Ċ", "ĊĊ", "<|end|>"])}
    rust = Tokenizer(models.BPE(vocabulary, merges=[("Ċ", "Ċ")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    tokenizer = type(tokenizer_with(CHATML))(
        tokenizer_object=rust,
        eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ m.role[0] + ':\n' + m.content }}"
        "{% if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:\n' }}{% endif %}",
    )
    dialogue = DialogueEncoder(tokenizer).encode([user("b"), answer("\nb")], {})
    assert vocabulary["ĊĊ"] in tokenizer("u:\nba:\n\nb<|end|>")["input_ids"]
    assert dialogue.token_ids == tokenizer("u:\nba:\n")["input_ids"] + tokenizer("\nb<|end|>")["input_ids"]
    assert dialogue.mask == [0] * 7 + [1] * 3


def test_a_label_is_the_answer_where_the_dialogue_has_none() -> None:
    assert dialogue_of("1 + 1?", "2") == [user("1 + 1?"), answer("2")]
    assert dialogue_of(TWO_TURNS[:3], "4") == TWO_TURNS
    assert dialogue_of(TWO_TURNS, "5") == TWO_TURNS
    with pytest.raises(UserError, match="no message of the assistant to train on"):
        dialogue_of(TWO_TURNS[:1], None)


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        DialogueEncoder(tokenizer_with(""))
