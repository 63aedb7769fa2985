"""Kernels run on a GPU; where there is none but Triton is installed, in its interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the first import of one

from tests.training.conftest import model_of

__all__ = ["model_of"]
