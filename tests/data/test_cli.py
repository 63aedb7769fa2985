"""``vime data`` from the command line."""

import json

import pytest

from tests.tiny import make_tokenizer
from vime.cli.main import main


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write_lines


@pytest.fixture
def checkpoint(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_good_file_is_summed_up(write, capsys):
    path = write({"prompt": "a", "label": 1}, {"prompt": "b"})
    assert main(["data", "check", path, "--input-key", "prompt", "--label-key", "label"]) == 0
    assert capsys.readouterr().out == f"{path}: ok: 2 rows, 1 with a label\n"


def test_a_label_key_that_no_row_has_is_a_mistake(write, capsys):
    path = write({"input": "a", "label": 1}, {"input": "b"})
    assert main(["data", "check", path, "--label-key", "answer"]) == 1
    assert capsys.readouterr().err == (
        f"error: {path}: no row has a label under the key 'answer' (--label-key); the first row has "
        "['input', 'label']\n"
    )


def test_a_folder_without_a_tokenizer_is_told_in_one_line(write, tmp_path, capsys):
    assert main(["data", "show", write({"input": "a"}), "--hf-checkpoint", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: --hf-checkpoint {tmp_path}: there is no tokenizer in it (tokenizer.json, tokenizer.model, vocab.json, "
        "tekken.json)\n"
    )


def test_bad_rows_are_listed_and_counted_where_they_are_alike(write, capsys):
    path = write(*["[]"] * 150, {"prompt": "b", "label": None})
    assert main(["data", "check", path, "--input-key", "prompt", "--label-key", "label", "--needs-label"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        *(f"{path}:{line}: a row must be a JSON object, not an array" for line in (1, 2, 3)),
        f"{path}: … and 147 more rows, for the same reason",
        f"{path}:151: label: is null, but the reward needs it",
        f"{path}: 151 of 151 rows are bad, 0 with a label",
    ]


def test_prompts_that_are_too_long_are_counted(write, checkpoint, capsys):
    path = write({"input": "1"}, {"input": "1 " * 50})
    flags = ["--hf-checkpoint", checkpoint, "--apply-chat-template", "--rollout-max-prompt-len"]
    assert main(["data", "check", path, *flags, "60"]) == 0
    assert capsys.readouterr().out.endswith("ok: 2 rows, 0 with a label, 1 over 60 tokens would be dropped\n")
    assert main(["data", "check", path, *flags, "1"]) == 1


def test_an_empty_file_is_not_fine(write, capsys):
    assert main(["data", "check", write()]) == 1
    assert "there are no rows" in capsys.readouterr().out


def test_show_prints_prompts_as_the_model_will_see_them(write, checkpoint, capsys):
    path = write({"input": "1", "label": 1}, {"input": "2"})
    flags = ["--label-key", "label", "--hf-checkpoint", checkpoint, "--apply-chat-template"]
    assert main(["data", "show", path, "-n", "1", *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"--- {path}:1, ")
    assert "label '1', metadata ['raw_label']\n<|im_start|>user\n1<|im_end|>" in out


DIALOGUE = {
    "prompt": [
        {"role": "user", "content": "2 + 1?"},
        {"role": "assistant", "content": "3", "step_loss_mask": 0},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
    ]
}
MASK = ["--input-key", "prompt", "--hf-checkpoint"]


def test_mask_marks_what_is_trained_in_a_pipe(write, checkpoint, capsys):
    path = write(DIALOGUE)
    assert main(["data", "mask", path, *MASK, checkpoint]) == 0
    title, text = capsys.readouterr().out.split("\n", 1)
    assert title.startswith(f"--- {path}:1: ")
    assert title.endswith(" tokens, 2 trained")
    assert text == (
        "<|im_start|>user\n2 + 1?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
    )


def test_mask_colours_tokens_on_a_terminal(write, checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", "mask", write(DIALOGUE), *MASK, checkpoint]) == 0
    out = capsys.readouterr().out
    assert "⟦" not in out
    assert "\x1b[1;" in out and "⏎" in out  # bold is what is trained
    assert out.count("\x1b[1;") == 2


def test_mask_writes_one_line_a_token(write, checkpoint, capsys):
    assert main(["data", "mask", write(DIALOGUE), *MASK, checkpoint, "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].split() == ["0", "-", "1", "'<|im_start|>'"]
    assert lines[-1].split() == [str(len(lines) - 1), "trained", "2", "'<|im_end|>'"]
    assert sum("trained" in line for line in lines) == 2


def test_bytes_of_one_character_are_shown_together(checkpoint):
    from vime.cli.mask import pieces_of
    from vime.data.dialogue import Dialogue
    from vime.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer("é1")["input_ids"]
    assert len(ids) == 3
    pieces = list(pieces_of(tokenizer, Dialogue(ids, [1, 1, 1])))
    assert [(piece.text, len(piece.token_ids)) for piece in pieces] == [("é", 2), ("1", 1)]


def test_rows_without_anything_to_train_are_told(write, checkpoint, capsys):
    path = write({"prompt": "1 + 1?"}, DIALOGUE)
    assert main(["data", "mask", path, *MASK, checkpoint]) == 1
    assert "data.jsonl:1: there is no message of the assistant to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["check", "none.jsonl"], "there is no such file"),
        (["check", "{file}", "--apply-chat-template"], "need a tokenizer: add --hf-checkpoint"),
        (["check", "{file}", "--hf-checkpoint", "none"], "no such folder"),
        (["mask", "{file}"], "needs a tokenizer: add --hf-checkpoint"),
    ],
)
def test_mistakes_are_one_line(write, capsys, words, what):
    path = write({"input": "1"})
    assert main(["data", *(word.format(file=path) for word in words)]) == 1
    error = capsys.readouterr().err
    assert what in error
    assert len(error.splitlines()) == 1
