"""The weight plan: its layout, and how two sides find out that they disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vime.weights.expected import ExpectedWeights
from vime.weights.plan import PlanMismatch, WeightPlan

ENTRIES = [("a", (2, 3), "float32"), ("b", (5,), "torch.bfloat16"), ("c", (300,), "float32")]


def test_tensors_lie_one_after_the_other_at_multiples_of_256_bytes() -> None:
    plan = WeightPlan.of(ENTRIES)
    assert [(spec.offset, spec.nbytes) for spec in plan.tensors] == [(0, 24), (256, 10), (512, 1200)]
    assert plan.total_bytes == 512 + 1280


def test_a_plan_survives_json() -> None:
    plan = WeightPlan.of(ENTRIES)
    again = WeightPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            [("a", (2, 3), "float32"), ("x", (5,), "bfloat16")],
            r"tensor 1 of the plan is x \(bfloat16 \[5\]\), b .* expected",
        ),
        ([("a", (3, 2), "float32")], r"a \(float32 \[3, 2\]\), a \(float32 \[2, 3\]\) was expected"),
        ([("a", (2, 3), "float16")], r"a \(float16 \[2, 3\]\), a \(float32 \[2, 3\]\) was expected"),
        (ENTRIES[:2], r"the plan lacks tensor c"),
        ([*ENTRIES, ("d", (1,), "float32")], r"the plan has the unexpected tensor d"),
    ],
)
def test_the_first_difference_between_two_plans_is_named(
    other: list[tuple[str, tuple[int, ...], str]], message: str
) -> None:
    with pytest.raises(PlanMismatch, match=message):
        WeightPlan.of(ENTRIES).check(WeightPlan.of(other))


def test_equal_plans_agree() -> None:
    WeightPlan.of(ENTRIES).check(WeightPlan.of(ENTRIES))


def test_a_name_that_comes_twice_and_a_dtype_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(PlanMismatch, match="the plan has a twice"):
        WeightPlan.of([ENTRIES[0], ENTRIES[0]])
    with pytest.raises(PlanMismatch, match="a: weights of dtype complex64 cannot be sent"):
        WeightPlan.of([("a", (1,), "complex64")])


@pytest.mark.parametrize(
    ("max_bytes", "ranges"),
    [(10_000, [(0, 3)]), (512, [(0, 2), (2, 3)]), (1, [(0, 1), (1, 2), (2, 3)])],
)
def test_buckets_hold_at_most_so_many_bytes_or_one_tensor(max_bytes: int, ranges: list[tuple[int, int]]) -> None:
    assert list(WeightPlan.of(ENTRIES).buckets(max_bytes)) == ranges


def served(folder: Path, *, tied: bool, names: list[str], **config: object) -> ExpectedWeights:
    save_file({name: torch.zeros(4, 2) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied, **config}))
    return ExpectedWeights.of_folder(folder, "bfloat16")


def sent(*names: str, dtype: str = "bfloat16", shape: tuple[int, ...] = (4, 2)) -> WeightPlan:
    return WeightPlan.of((name, shape, dtype) for name in names)


def test_the_plan_must_be_the_folders(tmp_path: Path) -> None:
    expected = served(tmp_path, tied=False, names=["a", "b", "lm_head.weight"])
    expected.check(sent("a", "b", "lm_head.weight"))
    with pytest.raises(PlanMismatch, match=r"missing tensors: b, lm_head.weight; unknown tensors: c"):
        expected.check(sent("a", "c"))
    with pytest.raises(PlanMismatch, match=r"wrong tensors: a has shape \[2, 4\] instead of \[4, 2\]"):
        expected.check(sent("a", shape=(2, 4)))


def test_a_tensor_has_the_engines_dtype_or_the_one_in_the_folder(tmp_path: Path) -> None:
    expected = served(tmp_path, tied=False, names=["a"])  # float32 in the folder, bfloat16 in the engine
    expected.check(sent("a", dtype="bfloat16"))
    expected.check(sent("a", dtype="float32"))
    with pytest.raises(PlanMismatch, match="a is float16, the engine serves bfloat16"):
        expected.check(sent("a", dtype="float16"))


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_output_layer_may_be_sent_or_not(stored: bool, tmp_path: Path) -> None:
    expected = served(tmp_path, tied=True, names=["a", "lm_head.weight"] if stored else ["a"])
    expected.check(sent("a"))
    expected.check(sent("a", "lm_head.weight"))


def test_layers_of_a_draft_model_need_not_be_sent(tmp_path: Path) -> None:
    names = ["model.layers.0.a", "model.layers.1.a", "mtp.a"]
    expected = served(tmp_path, tied=False, names=names, num_hidden_layers=1)
    expected.check(sent("model.layers.0.a"))


def test_a_folder_without_safetensors_cannot_be_checked_against(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatch, match="no safetensors files"):
        ExpectedWeights.of_folder(tmp_path, "bfloat16")
