"""Flags that the slots of the cluster cannot follow are refused before any process starts; what objects may take."""

import os
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.tiny import make_model
from tests.training.harness import config_of
from vime.cluster import session
from vime.cluster.session import (
    OBJECT_STORE_BYTES,
    Slots,
    check_devices,
    check_room,
    gpu_bytes_of_nodes,
    object_store_bytes,
)
from vime.errors import UserError
from vime.observe import machine
from vime.observe.gpu_memory import gpu_bytes


def slots(kind: str) -> Slots:
    return Slots(kind=kind, total=1, threads=1)


def test_accumulating_products_need_a_gpu(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    asked = config_of(model, "--gradient-accumulation-fusion")
    with pytest.raises(UserError, match=r"^--gradient-accumulation-fusion needs GPUs and there are none"):
        check_devices(asked, slots("CPU"))
    check_devices(asked, slots("GPU"))
    check_devices(config_of(model), slots("CPU"))
    check_devices(config_of(model, "--no-gradient-accumulation-fusion"), slots("CPU"))


def test_ranks_beyond_cores_are_one_line_and_beyond_memory_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake are the cluster of one node, and what the machine has."""
    config = config_of(make_model(tmp_path / "model"), "--actor-num-gpus-per-node", "4")
    said: list[str] = []
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(session, "cores", lambda: 2)
    monkeypatch.setattr(session, "host_bytes", lambda: 8 << 30)
    check_room(config, slots("CPU"), said.append)
    assert said == ["warning: 4 training ranks take turns on 2 cores, and start one after the other"]
    monkeypatch.setattr(session, "host_bytes", lambda: 2 << 30)
    with pytest.raises(UserError, match=r"^the run needs at least 2\.\d GiB: 4 x 0\.3 .* this machine has 2\.0$"):
        check_room(config, slots("CPU"), said.append)


def test_what_leaves_gpus_needs_memory_that_the_machine_may_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake are the nodes, their GPU, and what the machine has. A limit of the container refuses; what the machine says
    that it has is a warning, because the memory of some grows; several nodes are not judged."""
    config = config_of(make_model(tmp_path / "model"), "--colocate")
    said: list[str] = []
    nodes = [{"Alive": True}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(session, "gpu_bytes", lambda what: [80 << 30])
    monkeypatch.setattr(session, "host_limit", lambda: None)
    monkeypatch.setattr(session, "installed_bytes", lambda: 1 << 20)
    check_room(config, slots("GPU"), said.append)
    assert len(said) == 1
    assert said[0].startswith(
        "warning: beside its GPUs the run keeps at least 0.0 GiB in the machine's memory: 1 x 0.0"
    )
    monkeypatch.setattr(session, "host_limit", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"^beside its GPUs the run keeps .*; this container may take 0\.0$"):
        check_room(config, slots("GPU"), said.append)
    nodes.append({"Alive": True})
    check_room(config, slots("GPU"), said.append)
    assert len(said) == 1


@pytest.mark.skipif(bool(gpu_bytes("total")), reason="this machine has GPUs itself")
def test_a_driver_without_gpus_asks_the_nodes_that_have_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and its two nodes are real; the GPUs of one, and the program that tells their memory there, are not."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "1024\\n512"\n')
    tool.chmod(0o755)
    config = config_of(make_model(tmp_path / "model"))
    said: list[str] = []
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1)
        ray.init(cluster.address, log_to_driver=False)
        check_room(config, slots("GPU"), said.append)
        assert said == [
            "warning: no node says how much memory its GPUs have (nvidia-smi): whether the run fits was not checked"
        ]
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        cluster.add_node(num_cpus=1, num_gpus=2)
        monkeypatch.undo()
        assert gpu_bytes_of_nodes() == [1 << 30, 1 << 29]
        monkeypatch.setattr("vime.config.memory.GRADIENT", 1 << 20)
        with pytest.raises(UserError, match=r"^a training rank needs at least .*; a GPU has 0\.5: "):
            check_room(config, slots("GPU"), said.append)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert len(said) == 1


def test_a_container_has_the_memory_that_it_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "LIMITS", (str(limit),))
    whole = machine.host_bytes()
    limit.write_text("max\n")
    assert machine.host_bytes() == whole
    assert machine.host_limit() is None
    limit.write_text(f"{2**63 - 4096}\n")
    assert machine.host_limit() is None, "version 1 has no word for that"
    limit.write_text(f"{1 << 30}\n")
    assert machine.host_bytes() == machine.host_limit() == 1 << 30


def test_batches_with_routes_have_the_room_that_ray_would_choose(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe")
    assert object_store_bytes(config_of(model)) == OBJECT_STORE_BYTES
    assert object_store_bytes(config_of(model, "--use-rollout-routing-replay")) is None
