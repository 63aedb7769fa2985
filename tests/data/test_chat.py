"""From prompts to text and token ids."""

import pytest
import transformers

from tests.tiny import make_tokenizer
from vime.data.chat import PromptEncoder
from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError

QUESTION = "What is 1 + 2?"
MESSAGES = [{"role": "user", "content": QUESTION, "step_loss_mask": 1}]
RENDERED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def templated(tokenizer):
    return PromptEncoder(tokenizer, apply_chat_template=True)


@pytest.mark.parametrize("prompt", [QUESTION, MESSAGES])
def test_a_text_is_one_user_message_for_the_template(templated, prompt):
    assert templated.render(prompt, {}) == RENDERED


def test_the_ids_of_a_rendered_prompt_are_those_of_the_template(tokenizer, templated):
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert templated.encode(RENDERED) == expected
    assert templated.encode(MESSAGES) == expected


def test_without_a_template_a_text_is_tokenized_as_the_tokenizer_does(tokenizer):
    assert PromptEncoder(tokenizer).encode(QUESTION) == tokenizer(QUESTION)["input_ids"]


def test_special_tokens_are_added_to_plain_texts_only(tokenizer):
    from tokenizers.processors import TemplateProcessing

    rust = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    rust.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    with_bos = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, chat_template=tokenizer.chat_template)
    assert PromptEncoder(with_bos).encode("1")[0] == 0
    assert 0 not in PromptEncoder(with_bos, apply_chat_template=True).encode(RENDERED)


def test_without_a_template_a_list_stays_a_list_for_custom_functions(tokenizer):
    encoder = PromptEncoder(tokenizer)
    assert encoder.render(MESSAGES, {}) == MESSAGES
    with pytest.raises(UserError, match="set --apply-chat-template"):
        encoder.encode(MESSAGES)


@pytest.mark.parametrize("tools", [[{"name": "calculator"}], '[{"name": "calculator"}]'])
def test_tools_and_further_arguments_reach_the_template(tokenizer, tools):
    echo = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template="{{ tools[0].name }} {{ mode }} {{ add_generation_prompt }}",
    )
    encoder = PromptEncoder(echo, apply_chat_template=True, template_kwargs={"mode": "fast"}, tool_key="t")
    assert encoder.render("q", {"t": tools}) == "calculator fast True"


def test_a_template_that_refuses_says_why(tokenizer):
    strict = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template="{{ raise_exception('no system role') }}"
    )
    with pytest.raises(UserError, match="the chat template refuses the prompt: TemplateError: no system role"):
        PromptEncoder(strict, apply_chat_template=True).render("q", {})


def test_half_of_a_character_that_a_function_put_into_a_prompt_is_told(tokenizer):
    with pytest.raises(UserError, match=r"the prompt 'so \\ud800' holds \\ud800, which is half of a character"):
        PromptEncoder(tokenizer).encode("so \ud800")


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="has no chat template"):
        PromptEncoder(plain, apply_chat_template=True)


def test_lengths_of_texts_and_of_lists_that_stay_lists(tokenizer, templated):
    expected = [len(templated.encode(MESSAGES)), len(tokenizer(QUESTION)["input_ids"])]
    assert list(PromptEncoder(tokenizer).lengths([(MESSAGES, {}), (QUESTION, {})])) == expected
    assert list(templated.lengths([(QUESTION, {})] * 2000)) == expected[:1] * 2000


def test_a_tokenizer_is_loaded_from_its_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)(QUESTION)["input_ids"] == tokenizer(QUESTION)["input_ids"]


@pytest.mark.parametrize(
    ("files", "message"),
    [({}, "there is no tokenizer in it"), ({"tokenizer.json": "{}"}, "no tokenizer could be loaded")],
)
def test_a_folder_without_a_tokenizer_is_a_mistake_told_in_one_line(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
