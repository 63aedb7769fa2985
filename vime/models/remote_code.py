"""Python code that comes in a model's folder: Hugging Face's ``auto_map`` names it. None is run unless asked for."""

from __future__ import annotations

import json
from pathlib import Path


def tokenizer_code(folder: Path) -> str | None:
    """The file of which the tokenizer is made; None if transformers has the tokenizer's class itself."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    classes = (config.get("auto_map") or {}).get("AutoTokenizer") if isinstance(config, dict) else None
    names = [name for name in (classes if isinstance(classes, list) else [classes]) if name]
    return f"{str(names[0]).partition('.')[0]}.py" if names else None


def needs_trust(folder: Path | str, code: str) -> str:
    """What to say where code would have to be run."""
    return (
        f"--hf-checkpoint {folder}: its tokenizer is Python code in that folder ({code}), which runs only with "
        "--trust-remote-code"
    )
