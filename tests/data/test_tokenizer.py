"""Tokenizers that are Python code in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tokenizer
from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({trace!r}).touch()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file that the code makes when it runs."""
    return tmp_path / "it_ran"


@pytest.fixture
def folder(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own_code"
    make_tokenizer().save_pretrained(folder)
    (folder / "tokenization_own.py").write_text(CODE.format(trace=str(trace)))
    path = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    return folder


def test_code_of_a_model_runs_only_if_that_was_asked_for(folder: Path, trace: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert str(caught.value) == (
        f"--hf-checkpoint {folder}: its tokenizer is Python code in that folder (tokenization_own.py), which runs only "
        "with --trust-remote-code"
    )
    assert not trace.exists()
    assert type(load_tokenizer(folder, trust_remote_code=True)).__name__ == "OwnTokenizer"
    assert trace.exists()
