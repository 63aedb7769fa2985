"""A run that was saved under one layout goes on under another as if nothing had happened: weights, moments, schedule.

Each world size is started once, with all that it has to save and to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.learner import Learner, config_of
from tests.tiny import add_mtp_layer, make_model
from tests.training.harness import on_ranks
from vime.platform.sockets import free_port

TP, PP, CP = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
VPP, EP = "--virtual-pipeline-model-parallel-size", "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
DISTRIBUTED = "--use-distributed-optimizer"
LAYOUTS: Mapping[str, tuple[int, list[str]]] = {
    "1": (1, []),
    "1 do": (1, [DISTRIBUTED]),
    "tp2": (2, [TP, "2"]),
    "tp2 sp": (2, [TP, "2", "--sequence-parallel"]),
    "pp2": (2, [PP, "2"]),
    "cp2": (2, [CP, "2"]),
    "dp2": (2, []),
    "dp2 do": (2, [DISTRIBUTED]),
    "tp2 pp2": (4, [TP, "2", PP, "2"]),
    "tp2 sp dp2 do": (4, [TP, "2", "--sequence-parallel", DISTRIBUTED]),
    "pp2 cp2 do": (4, [PP, "2", CP, "2", DISTRIBUTED]),
    "dp4 do": (4, [DISTRIBUTED]),
    "pp2 vpp2": (2, [PP, "2", VPP, "2"]),
    "tp2 pp2 vpp2": (4, [TP, "2", PP, "2", VPP, "2"]),
    "ep2": (2, [EP, "2"]),
    "tp2 sp etp1": (2, [TP, "2", "--sequence-parallel", ETP, "1"]),
    "tp2 sp ep2 etp2 do": (4, [TP, "2", "--sequence-parallel", EP, "2", ETP, "2", DISTRIBUTED]),
    "pp2 vpp2 ep2 do": (4, [PP, "2", VPP, "2", EP, "2", DISTRIBUTED]),
}
"""Processes and flags by name; "do" is the distributed optimizer. Without it there must be none on the other side."""


@dataclass(frozen=True)
class Row:
    """Saved under one layout and loaded under another."""

    saved: str
    loaded: str
    ckpt_format: str = "torch_dist"

    def __str__(self) -> str:
        return f"{self.saved} to {self.loaded}, {self.ckpt_format}"


FEW = [
    Row("1", "tp2"),
    Row("tp2 sp", "pp2"),
    Row("dp2 do", "1 do"),
    Row("cp2", "dp2"),
    Row("tp2", "tp2"),
    Row("1", "1", "torch"),
    Row("tp2", "tp2", "torch"),
    Row("dp2 do", "dp2 do", "torch"),
    Row("tp2", "pp2 vpp2"),
    Row("pp2 vpp2", "pp2"),
]
EXPERTS = [
    Row("1", "tp2 sp etp1"),
    Row("tp2 sp etp1", "ep2"),
    Row("pp2 vpp2", "tp2 sp"),
    Row("ep2", "pp2 vpp2"),
]
MANY_EXPERTS = [
    Row("tp2 sp etp1", "1"),
    Row("tp2 sp etp1", "tp2 sp etp1", "torch"),
    Row("1 do", "tp2 sp ep2 etp2 do"),
    Row("tp2 sp ep2 etp2 do", "pp2 vpp2 ep2 do"),
    Row("pp2 vpp2 ep2 do", "dp2 do"),
]
"""Of a model whose layer for multi-token prediction is trained; it is on the last pipeline stage."""

MANY = [
    Row("1", "tp2 pp2"),
    Row("1 do", "pp2 cp2 do"),
    Row("tp2 sp", "tp2 pp2"),
    Row("dp2 do", "tp2 sp dp2 do"),
    Row("tp2 sp dp2 do", "pp2 cp2 do"),
    Row("pp2 cp2 do", "dp4 do"),
    Row("dp4 do", "1 do"),
    Row("tp2 pp2", "1"),
    Row("tp2 pp2", "tp2 pp2", "torch"),
    Row("pp2 vpp2", "tp2 pp2 vpp2"),
    Row("tp2 pp2 vpp2", "1"),
    Row("pp2 vpp2", "pp2 vpp2"),
    Row("pp2 vpp2", "pp2 vpp2", "torch"),
    Row("tp2 sp dp2 do", "tp2 sp dp2 do", "torch"),
]


@dataclass(frozen=True)
class Job:
    """What a group of processes does under one layout: learn, save, learn on; or load and learn on."""

    layout: str
    folder: Path
    ckpt_format: str
    saves: bool


def do_jobs(
    rank: int, world_size: int, hf_dir: Path, ports: Sequence[int], jobs: Sequence[Job], of_all: Sequence[str]
) -> list[Any]:
    """The weights that each job ends with, on rank 0."""
    from vime.training.checkpoint import load_megatron, save_megatron
    from vime.training.parallel import connect, disconnect

    results = []
    for port, job in zip(ports, jobs, strict=True):
        flags = ["--fp32", *of_all, *LAYOUTS[job.layout][1]]
        connect(config_of(hf_dir, *flags), rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port)
        try:
            learner = Learner(hf_dir, *flags)
            parts = (job.folder, learner.chunks, learner.optimizer, learner.scheduler)
            if job.saves:
                learner.learn(2)
                save_megatron(*parts, ckpt_format=job.ckpt_format)  # type: ignore[arg-type]
            else:
                assert load_megatron(*parts).optimizer
            learner.learn(2)
            results.append(learner.weights())
        finally:
            disconnect()
    return results


def weights_by_job(
    hf_dir: Path, folder: Path, rows: Sequence[Row], flags: Sequence[str]
) -> dict[Job, dict[str, torch.Tensor]]:
    """Runs everything that the rows need, in an order in which what is loaded has been saved."""
    loads = [Job(row.loaded, folder_of(folder, row), row.ckpt_format, False) for row in rows]
    saves = list(dict.fromkeys(Job(row.saved, folder_of(folder, row), row.ckpt_format, True) for row in rows))
    for job in saves:
        job.folder.mkdir()
    done: dict[Job, dict[str, torch.Tensor]] = {}
    for world in (1, 2, 4, 1):
        mine = [job for job in [*saves, *loads] if LAYOUTS[job.layout][0] == world and job not in done]
        saved = {job.folder for job in (*done, *mine) if job.saves}
        mine = [job for job in mine if job.folder in saved]
        if mine:
            arguments = (hf_dir, [free_port() for _ in mine], mine, flags)
            results = do_jobs(0, 1, *arguments) if world == 1 else on_ranks(world, do_jobs, *arguments)[0]
            done |= dict(zip(mine, results, strict=True))
    return done


def folder_of(folder: Path, row: Row) -> Path:
    return folder / f"{row.saved} {row.ckpt_format}"


def check(tmp_path: Path, hf_dir: Path, rows: Sequence[Row], *flags: str) -> None:
    done = weights_by_job(hf_dir, tmp_path, rows, flags)
    for row in rows:
        saved, loaded = (
            done[Job(layout, folder_of(tmp_path, row), row.ckpt_format, saves)]
            for layout, saves in ((row.saved, True), (row.loaded, False))
        )
        assert saved.keys() == loaded.keys(), row
        for name, tensor in saved.items():
            if row.saved == row.loaded:
                assert torch.equal(tensor, loaded[name]), (str(row), name)
            else:
                torch.testing.assert_close(loaded[name], tensor, atol=1e-6, rtol=0, msg=f"{row}: {name}")


def dense(folder: Path) -> Path:
    return make_model(folder / "hf", vocab_size=515, num_hidden_layers=4)


def experts(folder: Path) -> Path:
    return add_mtp_layer(make_model(folder / "hf", "glm4_moe", num_hidden_layers=4))


MTP = ("--mtp-num-layers", "1", "--enable-mtp-training")


def test_a_run_goes_on_under_another_layout(tmp_path: Path) -> None:
    check(tmp_path, dense(tmp_path), FEW)


def test_experts_and_a_draft_layer_go_on_under_another_layout(tmp_path: Path) -> None:
    check(tmp_path, experts(tmp_path), EXPERTS, *MTP)


@pytest.mark.slow
def test_a_run_goes_on_under_many_other_layouts(tmp_path: Path) -> None:
    check(tmp_path, dense(tmp_path), [*FEW, *MANY])


@pytest.mark.slow
def test_experts_and_a_draft_layer_go_on_under_many_other_layouts(tmp_path: Path) -> None:
    check(tmp_path, experts(tmp_path), [*EXPERTS, *MANY_EXPERTS], *MTP)
