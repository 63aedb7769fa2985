"""Tests of what runs on GPUs; kernels also run in Triton's interpreter, see ``tests/conftest.py``.

    pytest tests/gpu -m "not two_gpus"
    pytest tests/gpu -m two_gpus

``README.md`` says in which order, and how long it takes. Where there are too few GPUs a test says so and is skipped.
With ``VIME_GPU_TESTS_ON_CPU=1`` what a CPU can do as well runs there: the same code over gloo and shared memory, to
see on a machine without GPUs that a test works.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.training.conftest import model_of

__all__ = ["model_of"]

NEEDED = {"one_gpu": 1, "two_gpus": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    anyway = os.environ.get("VIME_GPU_TESTS_ON_CPU") == "1"
    for item in items:
        for name, needed in NEEDED.items():
            if item.get_closest_marker(name) is not None and found < needed and not anyway:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s'[: needed - 1]}, there are {found}"))
