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


def test_every_bad_row_is_listed(write, capsys):
    path = write(*["[]"] * 150, {"prompt": "b", "label": None})
    assert main(["data", "check", path, "--input-key", "prompt", "--label-key", "label", "--needs-label"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 152
    assert lines[150:] == [
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


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["check", "none.jsonl"], "there is no such file"),
        (["check", "{file}", "--apply-chat-template"], "need a tokenizer: add --hf-checkpoint"),
        (["check", "{file}", "--hf-checkpoint", "none"], "no such folder"),
    ],
)
def test_mistakes_are_one_line(write, capsys, words, what):
    path = write({"input": "1"})
    assert main(["data", *(word.format(file=path) for word in words)]) == 1
    error = capsys.readouterr().err
    assert what in error
    assert len(error.splitlines()) == 1
