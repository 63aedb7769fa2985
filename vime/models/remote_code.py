"""The tokenizer of a model's folder: whether it has one, and whether that is Python code in the folder, which Hugging
Face's ``auto_map`` names. None is run unless asked for."""

from __future__ import annotations

import json
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def tokenizer_code(folder: Path) -> str | None:
    """The file of which the tokenizer is made; None if transformers has the tokenizer's class itself."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    classes = (config.get("auto_map") or {}).get("AutoTokenizer") if isinstance(config, dict) else None
    names = [name for name in (classes if isinstance(classes, list) else [classes]) if name]
    return f"{str(names[0]).partition('.')[0]}.py" if names else None


def tokenizer_problem(folder: Path, *, trust_remote_code: bool) -> str | None:
    """Why no tokenizer can be loaded from a model's folder, as far as the names of its files say so."""
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    code = tokenizer_code(folder)
    if code is None:
        return f"--hf-checkpoint {folder}: there is no tokenizer in it ({', '.join(TOKENIZER_FILES)})"
    return None if trust_remote_code else needs_trust(folder, code)


def needs_trust(folder: Path | str, code: str) -> str:
    """What to say where code would have to be run."""
    return (
        f"--hf-checkpoint {folder}: its tokenizer is Python code in that folder ({code}), which runs only with "
        "--trust-remote-code"
    )
