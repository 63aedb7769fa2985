"""Whole runs on a Ray cluster of two nodes, which are two addresses of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.e2e.harness import Run
from tests.e2e.test_runs import train_rows
from tests.processes import is_alive
from vime.platform.sockets import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HEAD = ray.util.get_node_ip_address()
"""The machine's own address: Ray takes no drivers on a node with another one."""

WORKER = "127.0.0.3"
DASHBOARD = free_port()
ROOT = Path(__file__).parents[2]
WITH_TOKEN = {**os.environ, "RAY_AUTH_MODE": "token"}
"""Ray 2.60 has token authentication on in clusters, and off in what would join one. (Our driver sees to it.)"""

RAY = Path(sys.executable).with_name("ray")


def start_node(log: Path, *words: str) -> subprocess.Popen[bytes]:
    """``ray start``, of a node with one slot."""
    command = [str(RAY), "start", *words, "--num-cpus", "1", "--disable-usage-stats", "--block"]
    command += ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(100 << 20)]
    command += ["--dashboard-agent-listen-port", str(free_port())]  # other Rays of this machine have the usual one
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=WITH_TOKEN, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_for_nodes(address: str, count: int, logs: Path) -> None:
    """Fails with what the nodes say when they are not there in time."""
    script = f"import ray; ray.init(address={address!r}, log_to_driver=False); print(len(ray.nodes()))"
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = subprocess.run(
            [sys.executable, "-c", script], env=WITH_TOKEN, capture_output=True, text=True, timeout=120
        )
        if found.stdout.strip() == str(count):
            return
        time.sleep(1)
    raise AssertionError("\n".join(log.read_text()[-2000:] for log in logs.glob("*.log")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of two nodes with a slot each, so that trainer and engine cannot stand on the same one."""
    logs = tmp_path_factory.mktemp("nodes")
    port = free_port(HEAD)
    with tempfile.TemporaryDirectory(prefix="vime-ray-") as scratch:  # paths of sockets must be short
        head = ["--head", "--node-ip-address", HEAD, "--port", str(port), "--temp-dir", scratch]
        nodes = [start_node(logs / "head.log", *head, "--dashboard-port", str(DASHBOARD))]
        address = f"{HEAD}:{port}"
        tree: list[psutil.Process] = []
        try:
            wait_for_nodes(address, 1, logs)
            nodes.append(start_node(logs / "worker.log", "--address", address, "--node-ip-address", WORKER))
            wait_for_nodes(address, 2, logs)
            yield address
        finally:
            for node in nodes:
                tree += [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
                node.terminate()
            psutil.wait_procs(tree, timeout=20)
            for process in tree:
                if is_alive(process):
                    process.kill()


def separate(flags: list[str]) -> list[str]:
    return [word for word in flags if word != "--colocate"] + ["--rollout-num-gpus", "1"]


def test_a_trainer_and_an_engine_on_different_nodes(
    flags: list[str], save: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights can only come over the process group: every rollout compares the log-probs of both sides."""
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with Run(save, *separate(flags), "--num-rollout", "3", "--update-weight-buffer-size", "50000") as run:
        run.finish()
    rows = train_rows(run)
    assert len(rows) == 3
    assert all(row["train/train_rollout_logprob_abs_diff_max"] < 1e-4 for row in rows)
    assert any(row["train/grad_norm"] > 0 for row in rows), "there is something to carry"
    versions = [sorted({v for s in run.samples(r) for v in s["weight_versions"]}) for r in range(3)]
    assert versions == [[1], [2], [3]]
    engine = (save / "logs" / "engine_0.log").read_text()
    assert engine.count("the model computes with what was sent") == 4
    assert {HEAD, WORKER} & set(addresses(engine)), "the engine listens where other nodes reach it"


def addresses(log: str) -> list[str]:
    return [word for word in (HEAD, WORKER) if f"http://{word}:" in log]


def test_a_job_is_submitted(flags: list[str], save: Path, cluster: str) -> None:
    """As the guide says it: ``ray job submit -- python3 train.py ...``."""
    train = [sys.executable, str(ROOT / "train.py"), *separate(flags), "--num-rollout", "2", "--save", str(save)]
    command = [str(RAY), "job", "submit", "--address", f"http://127.0.0.1:{DASHBOARD}", "--"]
    words = [*command, "env", f"PYTHONPATH={ROOT}", *train]
    end = time.monotonic() + 120
    while True:
        submitted = subprocess.run(words, env=WITH_TOKEN, capture_output=True, text=True, timeout=400)
        if "No available agent" not in submitted.stderr or time.monotonic() > end:
            break
        time.sleep(2)  # a node takes jobs only some time after it has come up
    assert submitted.returncode == 0, submitted.stdout[-3000:] + submitted.stderr[-1000:]
    assert "rollout 2 of 2" in submitted.stdout
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


def test_shared_memory_is_refused_across_nodes(
    flags: list[str], save: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with Run(save, *separate(flags), "--num-rollout", "1", "--update-weight-transport", "shm") as run:
        assert run.wait() == 1
    assert "--update-weight-transport shm: engine 0 is not on the node of the trainer's first rank" in run.output()


def test_an_engine_that_no_node_has_room_for_is_refused(
    flags: list[str], save: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    words = ["--colocate", "--rollout-num-gpus-per-engine", "2", "--num-rollout", "1"]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    both = list(flags)
    both[both.index("--actor-num-gpus-per-node") + 1] = "2"
    with Run(save, *both, *words) as run:
        assert run.wait() == 1
    assert (
        "--rollout-num-gpus-per-engine 2: an engine runs on one node, and the nodes of this cluster (1, 1 CPU slots) "
        "have room for 0 of 1 engines" in run.output()
    )
