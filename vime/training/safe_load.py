"""What may be in a checkpoint besides tensors and plain values: what Megatron-LM notes of its flags and its state.

Everything else would be code of others, and a checkpoint that names it is not loaded.
"""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from signal import Signals
from types import SimpleNamespace

import torch
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
from torch.distributed.checkpoint.api import CheckpointException

from vime.errors import DamagedFile, UserError

__all__ = ["damaged", "safe_load"]

RECORDS = [Namespace, SimpleNamespace, PosixPath, Signals]
_READER = "PytorchStreamReader"  # whose complaints torch passes on
_OF_CODE = ("GLOBAL", "Can only", "must be imported")  # torch's words for what it does not load; else it cannot be read
_OF_DAMAGE = (OSError, EOFError, RuntimeError, ValueError, KeyError)
MEGATRONS = [ModelType, AttnBackend, CudaGraphScope, RerunDiagnostic, RerunMode, RerunState]


@contextmanager
def safe_load(path: Path) -> Iterator[None]:
    """In the block, ``torch.load(…, weights_only=True)`` knows Megatron-LM's notes; refusals name ``path``.

    Raises:
        UserError: the file names something else.
        DamagedFile: it is cut off.
    """
    try:
        with torch.serialization.safe_globals([*RECORDS, *MEGATRONS]):
            yield
    except pickle.UnpicklingError as error:
        raise _refusal(path, error) from None
    except CheckpointException as error:  # of torch.distributed.checkpoint, with what each rank raised
        raised = [each for each, _ in error.failures.values()]
        refused = [each for each in raised if isinstance(each, pickle.UnpicklingError)]
        if refused:
            raise _refusal(path, refused[0]) from None
        if not all(isinstance(each, _OF_DAMAGE) for each in raised):
            raise
        raise damaged(path, raised[0]) from error
    except (EOFError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _READER not in str(error):
            raise
        raise damaged(path, error) from error


def damaged(path: Path, error: BaseException) -> DamagedFile:
    """What to tell of a file, or of what is in a folder, that cannot be read to its end."""
    return DamagedFile(f"{path}: cannot be read: {f'{type(error).__name__}: {error}'.splitlines()[0][:200]}")


def _refusal(path: Path, error: pickle.UnpicklingError) -> UserError:
    _, found, reason = str(error).partition("WeightsUnpickler error: ")
    if not any(word in str(error) for word in _OF_CODE):
        return DamagedFile(f"{path}: cannot be read: {(reason if found else str(error)).strip().splitlines()[0]}")
    named = re.search(r"GLOBAL (\S+)", str(error))
    reason = reason.splitlines()[0] if found else f"it names {named[1]}" if named else "it names code"
    return UserError(f"{path}: has more than tensors and plain values, and is not loaded: {reason}")
