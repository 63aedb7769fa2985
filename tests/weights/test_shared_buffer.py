"""Memory that one process writes and others read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vime.weights.plan import PlanMismatch, WeightPlan
from vime.weights.shm import SharedBuffer, open_shared, view

PLAN = WeightPlan.of([("a", (2, 3), "float32"), ("b", (5,), "bfloat16")])
A = torch.arange(6.0).view(2, 3)
B = torch.arange(5.0)

READER = """
import sys
from vime.weights.plan import WeightPlan
from vime.weights.shm import open_shared, view
plan = WeightPlan.of([("a", (2, 3), "float32"), ("b", (5,), "bfloat16")])
data = open_shared(sys.argv[1], plan.total_bytes)
print([view(data, spec).tolist() for spec in plan.tensors])
"""


@pytest.fixture
def buffer() -> SharedBuffer:
    return SharedBuffer(PLAN.total_bytes)


def test_another_process_reads_what_was_written(buffer: SharedBuffer) -> None:
    buffer.write(PLAN, [("b", B), ("a", A)])  # in any order; b is converted to bfloat16
    out = subprocess.run([sys.executable, "-c", READER, buffer.path], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [0.0, 1.0, 2.0, 3.0, 4.0]]"


def test_readers_see_the_next_write_too(buffer: SharedBuffer) -> None:
    buffer.write(PLAN, [("a", A), ("b", B)])
    data = open_shared(buffer.path, PLAN.total_bytes)
    buffer.write(PLAN, [("a", A + 1), ("b", B + 1)])
    assert torch.equal(view(data, PLAN.tensors[0]), A + 1)
    assert torch.equal(view(data, PLAN.tensors[1]), (B + 1).bfloat16())


def test_parameters_are_written_without_their_gradients(buffer: SharedBuffer) -> None:
    buffer.write(PLAN, [("a", torch.nn.Parameter(A.clone())), ("b", torch.nn.Parameter(B.clone()))])
    assert torch.equal(view(buffer.data, PLAN.tensors[0]), A)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", A)], "1 tensors of the plan were not written: b and on"),
        ([("a", A), ("a", A)], "a comes twice"),
        ([("c", A)], "c is not in the plan"),
        ([("a", A.T)], r"a has shape \[3, 2\], the plan says \[2, 3\]"),
    ],
)
def test_what_does_not_follow_the_plan_is_refused(
    tensors: list[tuple[str, torch.Tensor]], message: str, buffer: SharedBuffer
) -> None:
    with pytest.raises(PlanMismatch, match=message):
        buffer.write(PLAN, tensors)


def test_a_plan_too_large_for_the_buffer_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="needs 512 bytes, the buffer has 256"):
        SharedBuffer(256).write(PLAN, [])


def test_a_closed_buffer_leaves_nothing(buffer: SharedBuffer) -> None:
    path = buffer.path
    buffer.close()
    assert not Path(path).exists()
    with pytest.raises(OSError, match="No such file"):
        open_shared(path, 1)
