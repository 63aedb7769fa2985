"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.errors import UserError


def load_tokenizer(hf_checkpoint: str | Path) -> Any:
    """Loads the tokenizer of ``hf_checkpoint``. Code that comes with a model is never run.

    Raises:
        UserError: there is none that can be loaded.
    """
    from transformers import AutoTokenizer

    if not Path(hf_checkpoint).is_dir():  # transformers would look for it on the network
        raise UserError(f"--hf-checkpoint {hf_checkpoint}: no such folder (it must be a local one)")
    try:
        return AutoTokenizer.from_pretrained(str(hf_checkpoint), trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for one and the same mistake
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--hf-checkpoint {hf_checkpoint}: no tokenizer could be loaded from there: {reason}"
        ) from error
