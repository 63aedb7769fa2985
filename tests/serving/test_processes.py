"""Servers end with whoever started them, with all their children, and say why they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.processes import is_running
from tests.tiny import make_model
from vime.errors import UserError
from vime.serving.engine import EngineServer, EngineSpec
from vime.serving.http import EngineError
from vime.serving.process import ReservedPort, ServerProcess

TREE = """
import os, signal, subprocess, sys, time
depth = int(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], start_new_session=True)
time.sleep(600)
"""
"""A process with a child in a session of its own, which has another: none of them heeds SIGTERM."""

PARENT = """
import sys, threading, time
from pathlib import Path
from vime.serving.process import ServerProcess
command = [sys.executable, "-c", sys.argv[2], "2", sys.argv[2]]
start = lambda: ServerProcess("the tree", command, log=Path(sys.argv[1]), environment={})
starter = threading.Thread(target=start)  # and the thread that started it ends long before the process
starter.start(); starter.join()
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def pids_in(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def start_tree(log: Path) -> ServerProcess:
    server = ServerProcess("the tree", [sys.executable, "-c", TREE, "2", TREE], log=log, environment={})
    wait_for(lambda: len(pids_in(log)) == 3)
    return server


def test_stop_ends_the_whole_tree_even_if_it_does_not_want_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.serving.process.GRACE_S", 0.5)
    log = tmp_path / "log"
    server = start_tree(log)
    server.stop()
    assert [pid for pid in pids_in(log) if is_running(pid)] == []


def test_a_killed_parent_leaves_nothing_though_the_starting_thread_ended_before(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log), TREE])
    wait_for(lambda: len(pids_in(log)) == 3)
    assert all(is_running(pid) for pid in pids_in(log))
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(is_running(pid) for pid in pids_in(log)))


def test_the_death_of_the_server_takes_its_children_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = start_tree(log)
    os.kill(pids_in(log)[0], signal.SIGKILL)
    wait_for(lambda: not any(is_running(pid) for pid in pids_in(log)))
    wait_for(lambda: server.failure() is not None)


def test_the_end_of_a_server_is_known_before_its_children_are_gone(tmp_path: Path) -> None:
    """It leaves a child that calls itself a resource tracker, for which a guard waits 8 s."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3)"
    arguments = [sys.executable, "-c", child, "multiprocessing.resource_tracker"]
    program = f"import subprocess; subprocess.Popen({arguments!r}); raise SystemExit(3)"
    server = ServerProcess("engine 3", [sys.executable, "-c", program], log=tmp_path / "log", environment={})
    begin = time.monotonic()
    assert server.ended().endswith("engine 3 ended with status 3: no error in its log")
    assert time.monotonic() - begin < 5
    assert psutil.Process(server.pid).children(), "the guard still waits for it"
    assert server.ended() == server.failure()
    server.stop()
    assert not psutil.pid_exists(server.pid)


def test_a_killed_guard_takes_the_server_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = start_tree(log)
    os.kill(server.pid, signal.SIGKILL)
    top, *below = pids_in(log)
    wait_for(lambda: not is_running(top))
    for pid in below:  # these do not ask to end with their parent; vLLM's engine core does, through our extension
        os.kill(pid, signal.SIGKILL)


def test_a_server_that_ended_tells_its_status_its_cause_and_its_last_words(tmp_path: Path) -> None:
    program = "print('hello'); raise ValueError('no such model')"
    server = ServerProcess("engine 3", [sys.executable, "-c", program], log=tmp_path / "log", environment={})
    wait_for(lambda: server.failure() is not None)
    failure = server.failure()
    assert failure is not None
    assert failure.startswith("The end of ")
    assert "\nhello\n" in failure
    assert failure.endswith("\nengine 3 ended with status 1: ValueError: no such model")


def test_a_killed_server_has_the_status_that_shells_give_it(tmp_path: Path) -> None:
    program = "import os; os.kill(os.getpid(), 9)"
    server = ServerProcess("engine 3", [sys.executable, "-c", program], log=tmp_path / "log", environment={})
    wait_for(lambda: server.failure() is not None)
    assert str(server.failure()).endswith("engine 3 ended with status 137: no error in its log")


def test_a_reserved_port_is_given_to_nobody_else_but_our_server_may_listen_on_it() -> None:
    port = ReservedPort("127.0.0.1")
    with socket.socket() as server, socket.socket() as other:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))
    port.release()


def test_a_port_that_is_in_use_is_named_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--vllm-router-port: port {number} of 127.0.0.1 cannot be used: .*in use"):
            ReservedPort("127.0.0.1", number, flag="--vllm-router-port")


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--hf-checkpoint {tmp_path}: there is no config.json"):
        EngineSpec(model=tmp_path)


def test_flags_of_the_user_win_over_defaults_but_not_over_what_vime_decides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = {"enforce_eager": False, "kv_cache_memory_bytes": 7, "host": "0.0.0.0", "disable_log_stats": False}
    command = EngineSpec(model=tmp_path, flags=flags).command("127.0.0.1", 8000)
    assert "--no-enforce-eager" in command
    assert command[command.index("--kv-cache-memory-bytes") + 1] == "7"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--no-enable-chunked-prefill" in command  # a default that was not overridden
    assert "--disable-log-stats" not in command


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", head_dim=16)
    spec = EngineSpec(model=model, dtype="float32", flags={"max_model_len": 100_000})
    server = EngineServer(spec, log_dir=tmp_path, index=4)
    with pytest.raises(
        EngineError, match=r"(?s)The end of .*engine_4.log.*engine 4 ended with status 1: .*max_model_len"
    ):
        server.start()
    assert server.failure() is not None


ENGINE_PARENT = """
import sys, time
from pathlib import Path
from vime.serving.engine import EngineServer, EngineSpec
server = EngineServer(EngineSpec(model=Path(sys.argv[1]), dtype="float32"), log_dir=Path(sys.argv[2]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "guard"])
def test_a_real_engine_is_gone_when_its_parent_or_its_guard_is_killed(victim: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    shm_before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", ENGINE_PARENT, str(model), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    tree = [guard, *(process.pid for process in psutil.Process(guard).children(recursive=True))]
    assert len(tree) >= 3  # guard, API server, engine core
    os.kill(guard if victim == "guard" else parent.pid, signal.SIGKILL)
    wait_for(lambda: not any(is_running(pid) for pid in tree))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert set(os.listdir("/dev/shm")) <= shm_before


def test_engines_record_routes_by_themselves_on_gpus_and_by_our_classes_on_cpus(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    on_gpus, on_cpus = (EngineSpec(model=tmp_path, cpu=cpu, routes=True) for cpu in (False, True))
    assert "--enable-return-routed-experts" in on_gpus.command("127.0.0.1", 8000)
    assert on_gpus.environment()["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    words = on_cpus.command("127.0.0.1", 8000)
    assert words[words.index("--worker-cls") + 1] == "vime.serving.recording.RecordingWorker"
    assert words[words.index("--scheduler-cls") + 1] == "vime.serving.recording.RecordingScheduler"
    assert "--enable-return-routed-experts" not in words


def test_an_engine_on_gpus_has_queues_of_its_own_choice(tmp_path: Path) -> None:
    """One queue, which a run may have been given for Megatron, would make its copies wait."""
    (tmp_path / "config.json").write_text("{}")
    assert EngineSpec(model=tmp_path, cpu=False).environment()["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in EngineSpec(model=tmp_path).environment()


def test_cpus_cannot_tell_the_routes_of_latent_attention(tmp_path: Path) -> None:
    """vLLM turns its prefix cache off there."""
    make_model(tmp_path, "deepseek_v3")
    EngineSpec(model=tmp_path, cpu=False, routes=True)
    with pytest.raises(UserError, match="--use-rollout-routing-replay needs the prefix cache of engines, which vLLM"):
        EngineSpec(model=tmp_path, routes=True)
