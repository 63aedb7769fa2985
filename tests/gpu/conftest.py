"""Tests of what runs on GPUs; kernels also run in Triton's interpreter, see ``tests/conftest.py``."""

from __future__ import annotations

from tests.training.conftest import model_of

__all__ = ["model_of"]
