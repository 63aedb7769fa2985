"""The matrix of layouts: what runs, and how a run over several processes is compared with the same one on one process.

A row is a model and an objective; it runs in every layout that is listed for it. To add a model, add a ``Row`` to a
table of a test module (see ``test_layouts.py``) with

* ``family`` and ``overrides``, as ``tests.tiny.make_model`` takes them;
* ``flags`` of vime for everything but the layout;
* ``layouts``, by name, from ``LAYOUTS``; add one there where another combination is wanted;
* ``samples``, where others than 16 of one child each are to be trained;
* ``mtp``, where the model is to have a layer for multi-token prediction;
* ``tolerance``, where fp32's does not hold, with the reason;
* ``around``, where something must be the same in all layouts that is not (the routes of a mixture of experts): a
  context in which a worker computes. It is entered with the worker and what the run on one process left (None in that
  run), and gives what its run leaves; both cross processes by pickle.

Every world size starts its processes once and goes through all its rows and layouts in them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tests.tiny import add_mtp_layer, make_model
from tests.training.harness import DEADLINE_S, config_of, free_port, make_samples, on_ranks, started
from vime.cluster.training_job import split
from vime.config import Config
from vime.models import WeightRule, weight_map
from vime.training.gathering import gather
from vime.training.model_worker import ModelWorker
from vime.training.step import Learner
from vime.training.weights_io import drain, dtype_of, global_parameters
from vime.training.worker import TrainWorker
from vime.types import RolloutBatch, TrainBatch, TrainSample, TrainStep

Around = Callable[[TrainWorker, Any], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How processes share a model: what is set in ``config.parallel`` and ``config.megatron``."""

    world_size: int
    parallel: Mapping[str, Any] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, config: Config) -> Config:
        """Behind the rules of the command line, which have tests of their own."""
        return dataclasses.replace(
            config,
            cluster=dataclasses.replace(config.cluster, actor_num_gpus_per_node=self.world_size),
            parallel=dataclasses.replace(config.parallel, **self.parallel),
            megatron=type(config.megatron)({**config.megatron, **self.megatron}),
        )


def _of(world_size: int, *, megatron: Mapping[str, Any] | None = None, **parallel: Any) -> Layout:
    long = {"tp": "tensor", "pp": "pipeline"}
    names = {short: f"{name}_model_parallel_size" for short, name in long.items()}
    names |= {"cp": "context_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
    names |= {"sp": "sequence_parallel", "do": "use_distributed_optimizer"}
    names["vpp"] = "virtual_pipeline_model_parallel_size"
    fields = {names.get(name, name): value for name, value in parallel.items()}
    return Layout(world_size=world_size, parallel=fields, megatron=megatron or {})


def recompute(granularity: str, method: str | None = None, layers: int | None = None) -> dict[str, Any]:
    return {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


OVERLAP_GRADIENTS = {"overlap_grad_reduce": True, "bucket_size": 10_000}
OVERLAP = OVERLAP_GRADIENTS | {"overlap_param_gather": True}
"""Buckets so small that there are several: with one, nothing would overlap."""

PROBE = -1
SECONDS_EACH = 15
"""For one layout on busy cores, in a deadline."""

ALONE = _of(1)
LAYOUTS: dict[str, Layout] = {
    "dp2": _of(2),
    "dp2 overlap": _of(2, megatron=OVERLAP_GRADIENTS),
    "dp2 do": _of(2, do=True),
    "dp2 do overlap": _of(2, do=True, megatron=OVERLAP),
    "tp2": _of(2, tp=2),
    "tp2 sp": _of(2, tp=2, sp=True),
    "tp2 sp selective": _of(2, tp=2, sp=True, **recompute("selective")),
    "pp2": _of(2, pp=2),
    "pp2 full": _of(2, pp=2, **recompute("full", "uniform", 1)),
    "pp2 block": _of(2, pp=2, **recompute("full", "block", 1)),
    "pp2 vpp2": _of(2, pp=2, vpp=2),
    "pp2 vpp2 full": _of(2, pp=2, vpp=2, **recompute("full", "uniform", 1)),
    "pp2 uneven": _of(2, pp=2, megatron={"num_layers_in_first_pipeline_stage": 3}),
    "cp2": _of(2, cp=2),
    "cp2 do": _of(2, cp=2, do=True),
    "cp2 full": _of(2, cp=2, **recompute("full", "uniform", 2)),
    "cp2 selective": _of(2, cp=2, **recompute("selective")),
    "dp4 do overlap": _of(4, do=True, megatron=OVERLAP),
    "dp2 cp2 do": _of(4, cp=2, do=True),
    "dp2 pp2 do": _of(4, pp=2, do=True),
    "dp2 pp2 vpp2 do overlap": _of(4, pp=2, vpp=2, do=True, megatron=OVERLAP),
    "dp2 tp2 sp do overlap": _of(4, tp=2, sp=True, do=True, megatron=OVERLAP),
    "tp2 sp pp2 do": _of(4, tp=2, sp=True, pp=2, do=True),
    "tp2 sp pp2 vpp2": _of(4, tp=2, sp=True, pp=2, vpp=2),
    "tp2 sp cp2 do": _of(4, tp=2, sp=True, cp=2, do=True),
    "tp2 cp2 full": _of(4, tp=2, cp=2, **recompute("full", "uniform", 1)),
    "pp2 cp2": _of(4, pp=2, cp=2),
    "pp2 vpp2 cp2": _of(4, pp=2, vpp=2, cp=2),
    "pp4": _of(4, pp=4),
    "cp4": _of(4, cp=4),
}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences from one process."""

    loss: float = 5e-6  # and every other metric that is a mean, absolute
    log_prob: float = 5e-6  # nats, of any token
    gradient_norm: float = 2e-5  # relative
    gradient: float = 2e-5  # of each parameter, relative to its norm
    update: float = 1e-3  # of each parameter, relative to the norm of what two steps changed


FP32 = Tolerance()


def nothing_around(worker: TrainWorker, left: Any) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Which of the models that learn is looked at. Functions of modules: they cross processes."""

    started: Callable[..., AbstractContextManager[Any]]  # as ``harness.started``
    rules: Callable[[Any], Sequence[WeightRule]]  # worker → what its parameters are
    prepared: Callable[[Any, TrainBatch], TrainBatch]  # its share of a rollout with all that training asks for
    says: Callable[[Any, TrainBatch], dict[int, Tensor]]  # of each sample's response tokens, by its index
    gradient_norm: str  # the metric


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model and an objective, and the layouts that they run in."""

    family: str
    flags: Sequence[str]
    layouts: Sequence[str]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = FP32
    around: Around = nothing_around
    samples: Callable[[], Sequence[TrainSample]] = lambda: make_samples(16, masked=True)
    mtp: bool = False  # the model has a layer for multi-token prediction
    subject: Subject = field(default_factory=lambda: ACTOR)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row with everything that processes need of it, for one layout."""

    config: Config
    around: Around
    subject: Subject
    shares: Sequence[TrainBatch]  # one a data-parallel rank
    meeting: Path  # the file in which the first rank says on which port it listens
    left: Any = None  # by the run on one process


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw of two steps."""

    metrics: tuple[dict[str, float], ...]
    log_probs: dict[int, Tensor]  # by sample, before the two steps; empty beside the last pipeline stage
    gradients: dict[str, Tensor]  # of the first step, by HF name; empty beside rank 0
    updates: dict[str, Tensor]  # what the steps changed; empty beside rank 0
    disagreement: float  # between ranks that have the same parameters
    left: Any = None


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a run on several processes is from the one on one process; the fields of ``Tolerance``."""

    loss: float
    log_prob: float
    gradient_norm: float
    gradient: float
    update: float
    disagreement: float = 0.0

    def exceeded(self, tolerance: Tolerance) -> dict[str, float]:
        """The measures that are too large, or not numbers."""
        found = dataclasses.asdict(self)
        allowed = dataclasses.asdict(tolerance) | {"disagreement": 0.0}
        return {name: value for name, value in found.items() if not value <= allowed[name]}


def plan(row: Row, layout: Layout, models: tuple[Path, Path], left: Any = None) -> Work:
    """``models``: the actor's folder and the reference's."""
    actor, reference = models
    config = layout.applied(config_of(actor, *row.flags, "--load", str(actor), "--ref-load", str(reference)))
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    replicas = layout.world_size // (shared * parallel.context_parallel_size)
    shares = split(RolloutBatch(rollout_id=0, samples=tuple(row.samples())), replicas, config)
    meeting = actor.parent / uuid4().hex
    return Work(config=config, around=row.around, subject=row.subject, shares=shares, meeting=meeting, left=left)


def run_all(world_size: int, works: Mapping[str, Work]) -> dict[str, list[Outcome]]:
    """All of them in the same processes; the outcome of every rank."""
    by_rank = on_ranks(world_size, _run_all, works, deadline_s=DEADLINE_S + SECONDS_EACH * len(works))
    return {name: [outcomes[name] for outcomes in by_rank] for name in works}


def _run_all(rank: int, world_size: int, works: Mapping[str, Work]) -> dict[str, Outcome]:
    return {name: run(work, rank, world_size) for name, work in works.items()}


def run(work: Work, rank: int = 0, world_size: int = 1) -> Outcome:
    """What the model says of the samples, and two steps."""
    port, subject = _port(work.meeting, rank), work.subject
    with subject.started(work.config, rank=rank, world_size=world_size, port=port) as worker:
        share = subject.prepared(worker, work.shares[worker.info.dp_rank])
        rules = subject.rules(worker)
        before = whole_tensors(worker, rules)
        worker._learner = recorder = Recorder(worker, rules)
        with work.around(worker, work.left) as left:
            log_probs = subject.says(worker, share)
            metrics = worker.train(share).steps
        after = whole_tensors(worker, rules)
        return Outcome(
            metrics=metrics,
            log_probs=log_probs,
            gradients=recorder.gradients or {},
            updates={name: after[name] - before[name] for name in after},
            disagreement=disagreement(worker),
            left=left,
        )


def _port(meeting: Path, rank: int) -> int:
    """A port that is free right now: one that is chosen long before it is used is taken by somebody else."""
    if rank == 0:
        port = free_port()
        draft = meeting.with_suffix(".draft")
        draft.write_text(str(port))
        draft.rename(meeting)
        return port
    while not meeting.exists():  # the deadline is that of all ranks
        time.sleep(0.01)
    return int(meeting.read_text())


class Recorder:
    """Takes the place of a worker's learner, and keeps the gradients of its first step."""

    def __init__(self, worker: ModelWorker[Any], rules: Sequence[WeightRule]) -> None:
        self._worker, self._learner, self._rules = worker, worker._learner, rules
        self.gradients: dict[str, Tensor] | None = None

    def step(self, work: Any, step: TrainStep, **named: str) -> dict[str, float]:
        metrics = Learner.step(self._learner, work, step, **named)
        if self.gradients is None:
            self.gradients = whole_gradients(self._worker, self._rules)
        return metrics


def whole_tensors(worker: ModelWorker[Any], rules: Sequence[WeightRule]) -> dict[str, Tensor]:
    """Copies of the weights of the whole model by HF name, in float32; collective, and empty beside rank 0."""
    return _copies(gather(global_parameters(worker.chunks), rules, _experts(worker), dtype_of(worker.chunks)))


@torch.no_grad()
def whole_gradients(worker: ModelWorker[Any], rules: Sequence[WeightRule]) -> dict[str, Tensor]:
    """The gradients of the last step, as ``whole_tensors`` gives weights."""
    for chunk in worker.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if buffer.ddp_config.use_distributed_optimizer:  # each rank has the sums of its own shard only
                for bucket in buffer.buckets:
                    size, own = buffer.data_parallel_world_size, buffer.data_parallel_group.rank()
                    shard = bucket.grad_data.view(size, -1)[own].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=buffer.data_parallel_group)
    parameters = global_parameters(worker.chunks)
    gradients = {name: getattr(each, "main_grad", each) for name, each in parameters.items()}
    return _copies(gather(gradients, rules, _experts(worker), torch.float32))


def _experts(worker: ModelWorker[Any]) -> int:
    return 0 if worker.shape.moe is None else worker.shape.moe.num_experts


def _copies(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    if dist.get_rank() != 0:
        drain(tensors)
        return {}
    return {name: tensor.float().to("cpu", copy=True) for name, tensor in tensors}


def log_probs_by_sample(worker: TrainWorker, share: TrainBatch) -> dict[int, Tensor]:
    """The log-probs of each sample's response tokens, by its index; under ``PROBE`` those of a text alone."""
    chosen = [indices for step in share.steps for indices in step.micro_batches]
    packs = [worker._packer.pack([share.samples[i] for i in indices]) for indices in chosen]
    probe = worker.log_probs_of(range(1, 12), 4)
    found: dict[int, Tensor] = {PROBE: torch.tensor(probe)} if probe else {}
    for indices, log_probs in zip(chosen, worker._log_probs(packs), strict=True):
        if log_probs is not None:
            samples = [share.samples[i] for i in indices]
            parts = log_probs.split([sample.response_length for sample in samples])
            found |= {sample.index: part.to("cpu", copy=True) for sample, part in zip(samples, parts, strict=True)}
    return found


def _policy_rules(worker: TrainWorker) -> Sequence[WeightRule]:
    return weight_map(worker.shape)


def _as_it_is(worker: TrainWorker, share: TrainBatch) -> TrainBatch:
    return share


ACTOR = Subject(
    started=started,
    rules=_policy_rules,
    prepared=_as_it_is,
    says=log_probs_by_sample,
    gradient_norm="train/grad_norm",
)


@torch.no_grad()
def disagreement(worker: ModelWorker[Any]) -> float:
    """The largest difference of a parameter between ranks that should have the same one."""
    worst = 0.0
    for chunk in worker.chunks:
        for parameter in chunk.parameters():
            dense = getattr(parameter, "allreduce", True)
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            groups = [replicas if dense else parallel_state.get_expert_data_parallel_group()]
            if dense and not getattr(parameter, "tensor_model_parallel", False):
                groups.append(parallel_state.get_tensor_model_parallel_group())
            for group in groups:
                low, high = parameter.detach().clone(), parameter.detach().clone()
                dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
                dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
                worst = max(worst, float((high - low).abs().max()))
    return worst


def compare(ranks: Sequence[Outcome], alone: Outcome, norm: str) -> Deviation:
    """The largest differences over ranks, steps, tokens and parameters; ``norm`` is the metric that is relative."""
    log_probs = [(index, found) for rank in ranks for index, found in rank.log_probs.items()]
    assert {index for index, _ in log_probs} == alone.log_probs.keys()
    steps = [pair for rank in ranks for pair in zip(rank.metrics, alone.metrics, strict=True)]
    return Deviation(
        loss=max(_largest_difference(found, expected, leave=norm) for found, expected in steps),
        log_prob=max(float((found - alone.log_probs[index]).abs().max()) for index, found in log_probs),
        gradient_norm=max(abs(found[norm] / expected[norm] - 1) for found, expected in steps),
        gradient=_relative(ranks[0].gradients, alone.gradients),
        update=_relative(ranks[0].updates, alone.updates),
        disagreement=max(rank.disagreement for rank in ranks),
    )


def _largest_difference(found: Mapping[str, float], expected: Mapping[str, float], leave: str) -> float:
    names = {name for name in expected if not name.startswith("perf/") and name != leave}
    assert names <= found.keys()
    return max(abs(found[name] - expected[name]) for name in names)


def _relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(_distance(found[name], value) for name, value in expected.items())


def _distance(found: Tensor, expected: Tensor) -> float:
    difference, norm = float((found - expected).norm()), float(expected.norm())
    return difference / norm if norm else math.inf if difference else 0.0


class Matrix:
    """The outcomes of all rows, computed when the first of a world size is asked for."""

    def __init__(self, rows: Mapping[str, Row], folder: Path) -> None:
        self._rows, self._folder = rows, folder
        self._models: dict[str, tuple[Path, Path]] = {}
        self._alone: dict[str, Outcome] = {}
        self._spread: dict[int, dict[str, list[Outcome]]] = {}

    def deviation(self, row: str, layout: str) -> Deviation:
        size = LAYOUTS[layout].world_size
        if size not in self._spread:
            self._spread[size] = run_all(size, self.works(size))
        norm = self._rows[row].subject.gradient_norm
        return compare(self._spread[size][f"{row}: {layout}"], self.alone(row), norm)

    def works(self, world_size: int) -> dict[str, Work]:
        """By row and layout."""
        return {
            f"{name}: {layout}": plan(row, LAYOUTS[layout], self._model(row), self.alone(name).left)
            for name, row in self._rows.items()
            for layout in row.layouts
            if LAYOUTS[layout].world_size == world_size
        }

    def alone(self, name: str) -> Outcome:
        """On one process, which is this one."""
        if name not in self._alone:
            row = self._rows[name]
            self._alone[name] = run(plan(row, ALONE, self._model(row)))
        return self._alone[name]

    def _model(self, row: Row) -> tuple[Path, Path]:
        key = repr((row.family, row.mtp, sorted(row.overrides.items())))
        if key not in self._models:
            folders = [self._folder / f"{len(self._models)}-{seed}" for seed in (0, 1)]
            actor, reference = (make_model(each, row.family, seed=i, **row.overrides) for i, each in enumerate(folders))
            self._models[key] = (add_mtp_layer(actor), add_mtp_layer(reference)) if row.mtp else (actor, reference)
        return self._models[key]
