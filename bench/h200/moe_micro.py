"""The products and permutations of experts alone: what ``python -m bench.h200.moe --micro`` measures.

Rows are those of 16k tokens of which each goes to 8 of 128 experts, some of them liked more, in Qwen3-30B-A3B's sizes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from bench.h200.train_step import TOKENS

EXPERTS, TOP_K, HIDDEN, CHANNELS = 128, 8, 2048, 768
SHAPES = {"fc1": (2 * CHANNELS, HIDDEN), "fc2": (HIDDEN, CHANNELS)}  # outputs, inputs
PRODUCTS = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 256, 32, 8, 4),
    (128, 128, 64, 4, 3),
)
GRADIENTS = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 32, 4, 4),
)
"""Tiles to try: rows, columns, depth, warps, stages."""

Kind = str
"""forward, dgrad or wgrad"""


@dataclass
class Case:
    """Rows of one linear layer of all experts, and what is computed of them."""

    layer: str
    counts: list[int]

    def __post_init__(self) -> None:
        from vime.training.kernels.grouped import Table

        outputs, inputs = SHAPES[self.layer]
        rows = sum(self.counts)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = torch.randn(EXPERTS, outputs, inputs, **options) * 0.02
        self.x, self.dy = torch.randn(rows, inputs, **options), torch.randn(rows, outputs, **options)
        self.totals = torch.zeros(EXPERTS, outputs, inputs, device="cuda")
        self.table = Table.of_slices(self.weights)
        self.targets = Table.of_slices(self.totals)
        self.on_device = torch.tensor(self.counts, device="cuda")
        self.ends = self.on_device.cumsum(0).int()
        self.operations = 2.0 * rows * outputs * inputs

    def parts(self, x: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return x.split(self.counts)  # type: ignore[no-untyped-call,no-any-return]

    def looped(self, kind: Kind) -> object:
        """One product an expert, by cuBLAS."""
        if kind == "wgrad":
            for total, dy, x in zip(self.totals, self.parts(self.dy), self.parts(self.x), strict=True):
                torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)
            return self.totals
        if kind == "forward":
            return torch.cat([x @ w.t() for x, w in zip(self.parts(self.x), self.weights, strict=True)])
        return torch.cat([dy @ w for dy, w in zip(self.parts(self.dy), self.weights, strict=True)])

    def by_torch(self, kind: Kind) -> object:
        """torch's grouped product; it would need the weights side by side in order, and cannot add to gradients."""
        from torch.nn.functional import grouped_mm

        if kind == "wgrad":
            return self.totals.add_(grouped_mm(self.dy.t(), self.x, offs=self.ends))
        if kind == "forward":
            return grouped_mm(self.x, self.weights.transpose(1, 2), offs=self.ends)
        return grouped_mm(self.dy, self.weights, offs=self.ends)

    def by_triton(self, kind: Kind, words: tuple[int, ...]) -> Callable[[], object]:
        from vime.training.kernels import grouped

        tile = grouped.Tile(*words)
        groups = grouped.Groups.of(self.on_device, len(self.x), tile)
        outputs, inputs = SHAPES[self.layer]
        if kind == "wgrad":
            options: dict[str, Any] = {"dtype": torch.float32, "add": True, "tile": tile}
            return lambda: grouped.grouped_weight_gradients(self.dy, self.x, self.targets, groups, **options)
        if kind == "forward":
            return lambda: grouped.grouped_product(self.x, self.table, outputs, groups, tile)
        return lambda: grouped.grouped_product_transposed(self.dy, self.table, inputs, groups, tile)

    def candidates(self, kind: Kind) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "loop over experts, cuBLAS", lambda: self.looped(kind)
        yield "grouped_mm", lambda: self.by_torch(kind)
        for words in GRADIENTS if kind == "wgrad" else PRODUCTS:
            yield f"Triton {words}", self.by_triton(kind, words)

    def error(self, kind: Kind, call: Callable[[], Any]) -> float:
        """Relative distance from float64, of the worst of three experts; NaN where a number is not finite."""
        self.totals.zero_()
        result = call()
        found = self.totals if kind == "wgrad" else self.parts(result)
        distances = []
        for expert in (0, 1, EXPERTS - 1):
            x, dy = self.parts(self.x)[expert].double(), self.parts(self.dy)[expert].double()
            weight = self.weights[expert].double()
            exact = dy.t() @ x if kind == "wgrad" else x @ weight.t() if kind == "forward" else dy @ weight
            distances.append((found[expert].double() - exact).norm() / exact.norm())
        return float(torch.stack(distances).max())


def counts_of(tokens: int) -> list[int]:
    """Tokens of each expert where the scores of experts are random and some are liked more."""
    torch.manual_seed(0)
    scores = torch.randn(tokens, EXPERTS) + 0.3 * torch.randn(EXPERTS)
    return torch.bincount(scores.topk(TOP_K).indices.flatten(), minlength=EXPERTS).tolist()


def compile_candidate(job: tuple[str, Kind, tuple[int, ...]]) -> None:
    """In a process of its own, for the cache on disk. What goes wrong is told where the candidate is measured."""
    layer, kind, words = job
    try:
        Case(layer, [128] * EXPERTS).by_triton(kind, words)()
    except Exception as error:
        print(f"{job}: {error}")


def micro() -> dict[str, Any]:
    """TFLOP/s and errors of all candidates, milliseconds of the permutations."""
    from triton.testing import do_bench

    kinds = ("forward", "dgrad", "wgrad")
    begin = time.perf_counter()
    jobs = [
        (layer, kind, words)
        for layer in SHAPES
        for kind in kinds
        for words in (GRADIENTS if kind == "wgrad" else PRODUCTS)
    ]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_candidate, jobs))
    counts = counts_of(TOKENS)
    found: dict[str, Any] = {
        "compile_s": round(time.perf_counter() - begin, 1),
        "busiest_expert_over_mean": round(max(counts) * EXPERTS / sum(counts), 2),
    }
    for layer in SHAPES:
        case = Case(layer, counts)
        for kind in kinds:
            told: dict[str, Any] = {}
            for name, call in case.candidates(kind):
                try:
                    error = case.error(kind, call)
                    speed = case.operations / do_bench(call, warmup=10, rep=60, return_mode="median") / 1e9
                    told[name] = {"tflops": round(speed), "error": float(f"{error:.1e}")}
                except Exception as failure:  # another candidate may do
                    told[name] = {"failed": f"{type(failure).__name__}: {failure}"[:200]}
            found[f"{layer} {kind}"] = told
        del case, call
        torch.cuda.empty_cache()
    return found | {"permutation": permutations()}


def permutations() -> dict[str, Any]:
    """Milliseconds of finding the rows, of spreading tokens over them, and of adding them up; ours and Megatron's."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute
    from triton.testing import do_bench

    from vime.training.kernels.permute import collect, places_of, spread
    from vime.training.kernels.swiglu import weighted_swiglu, weighted_swiglu_gradients

    scores = torch.randn(TOKENS, EXPERTS, device="cuda")
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP_K).indices, True)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    pairs, rows = places_of(chosen, TOP_K)
    sources = pairs // EXPERTS
    y = spread(x, sources, rows)
    wide = torch.randn(len(y), 2 * CHANNELS, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(len(y), device="cuda")
    narrow = weighted_swiglu(wide, weights)
    count = chosen.sum()
    theirs, _, order = permute(x, chosen, probs=scores, num_out_tokens=len(y))
    calls: dict[str, Callable[[], Any]] = {
        "places": lambda: places_of(chosen, TOP_K),
        "spread": lambda: spread(x, sources, rows),
        "collect": lambda: collect(y, sources, rows),
        "Megatron's permute": lambda: permute(x, chosen, probs=scores, num_out_tokens=len(y)),
        "Megatron's unpermute": lambda: unpermute(theirs, order, restore_shape=x.shape, routing_map=chosen),
        "activation": lambda: weighted_swiglu(wide, weights),
        "activation, backward": lambda: weighted_swiglu_gradients(narrow, wide, weights, count),
    }
    return {
        name: {"ms": round(do_bench(call, warmup=10, rep=60, return_mode="median"), 4)} for name, call in calls.items()
    } | {"spread as Megatron does": torch.equal(y, theirs)}


def micro_table(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for case, told in found.items():
        if not isinstance(told, dict):
            lines.append(f"{case}: {told}")
            continue
        lines.append(case)
        lines += [f"    {name:34} {json.dumps(numbers)}" for name, numbers in told.items()]
    return lines
