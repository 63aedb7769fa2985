"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.errors import UserError
from vime.models.remote_code import needs_trust, tokenizer_code, tokenizer_problem


def load_tokenizer(hf_checkpoint: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of ``hf_checkpoint``.

    Args:
        trust_remote_code: run Python code that comes with the model, if its tokenizer is made of that.

    Raises:
        UserError: there is none that can be loaded.
    """
    if not Path(hf_checkpoint).is_dir():  # transformers would look for it on the network
        raise UserError(f"--hf-checkpoint {hf_checkpoint}: no such folder (it must be a local one)")
    problem = tokenizer_problem(Path(hf_checkpoint), trust_remote_code=trust_remote_code)
    if problem is not None:
        raise UserError(problem)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(hf_checkpoint), trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError … for one and the same mistake
        code = tokenizer_code(Path(hf_checkpoint))
        if code is not None and not trust_remote_code:
            raise UserError(needs_trust(hf_checkpoint, code)) from error
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--hf-checkpoint {hf_checkpoint}: no tokenizer could be loaded from there: {reason}"
        ) from error
