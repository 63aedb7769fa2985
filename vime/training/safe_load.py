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

from vime.errors import UserError

__all__ = ["safe_load"]

RECORDS = [Namespace, SimpleNamespace, PosixPath, Signals]
MEGATRONS = [ModelType, AttnBackend, CudaGraphScope, RerunDiagnostic, RerunMode, RerunState]


@contextmanager
def safe_load(path: Path) -> Iterator[None]:
    """In the block, ``torch.load(…, weights_only=True)`` knows Megatron-LM's notes; refusals name ``path``.

    Raises:
        UserError: the file names something else.
    """
    try:
        with torch.serialization.safe_globals([*RECORDS, *MEGATRONS]):
            yield
    except pickle.UnpicklingError as error:
        raise _refusal(path, error) from None
    except CheckpointException as error:  # of torch.distributed.checkpoint, with what each rank raised
        refused = [raised for raised, _ in error.failures.values() if isinstance(raised, pickle.UnpicklingError)]
        if not refused:
            raise
        raise _refusal(path, refused[0]) from None


def _refusal(path: Path, error: pickle.UnpicklingError) -> UserError:
    _, found, reason = str(error).partition("WeightsUnpickler error: ")
    named = re.search(r"GLOBAL (\S+)", str(error))
    reason = reason.splitlines()[0] if found else f"it names {named[1]}" if named else "it names code"
    return UserError(f"{path}: has more than tensors and plain values, and is not loaded: {reason}")
