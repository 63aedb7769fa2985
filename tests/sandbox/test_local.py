"""Attacks on the sandbox of this machine, at each isolation that the kernel offers. Everything here really runs."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.processes import children_with
from vime.sandbox import Limits, LocalSandbox, Outcome, SandboxError, local
from vime.sandbox.jail import _descendants
from vime.sandbox.local import _end
from vime.sandbox.types import MOST, MOST_SECONDS

ISOLATIONS = ("namespaces", "user_namespaces", "process")
SHUT_IN = ISOLATIONS[:2]
MIB = 1 << 20


def sandbox(isolation):
    """The sandbox, or a skip that says why this machine has none such."""
    found = LocalSandbox(isolation)
    try:
        asyncio.run(found.run({}, ["true"]))
    except SandboxError as error:
        pytest.skip(f"{isolation} does not work here: {error}")
    return found


@pytest.fixture(params=ISOLATIONS)
def anywhere(request):
    return sandbox(request.param)


@pytest.fixture(params=SHUT_IN)
def shut_in(request):
    return sandbox(request.param)


def limits(**given):
    return Limits(**{"wall_s": 5.0, "cpu_s": 5.0, "memory_bytes": 256 * MIB, **given})


def python(where, code, stdin="", **given):
    """Runs a program in the sandbox; nothing of the sandbox may be left afterwards."""
    result = asyncio.run(where.run({"main.py": code}, ["python3", "main.py"], stdin, limits(**given)))
    assert not children_with("main.py")
    return result


def open_to_all(folder):
    """pytest's folders are for its user alone; /tmp is not."""
    folder.chmod(0o1777)
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(0o755)


def left_over(marker):
    """Processes of the machine which carry the marker in their command line."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if marker in " ".join(process.info["cmdline"] or [])]


def test_a_program_reads_its_files_and_standard_input_and_its_outputs_and_exit_code_come_back(anywhere):
    files = {
        "main.py": "import sys\nprint(open('data/in.txt').read(), input())\nsys.exit('bad')",
        "data/in.txt": "file",
    }
    result = asyncio.run(anywhere.run(files, ["python3", "main.py"], "stdin\n"))
    assert (result.stdout, result.stderr) == ("file stdin\n", "bad\n")
    assert (result.status, result.exit_code, result.ok) == (Outcome.EXITED, 1, False)
    assert 0 < result.seconds < 10


def test_a_command_that_does_not_exist_ends_as_in_a_shell(anywhere):
    result = asyncio.run(anywhere.run({}, ["no-such-program"]))
    assert (result.exit_code, result.ok) == (127, False)
    assert "cannot run no-such-program" in result.stderr


def test_a_program_that_a_signal_ends_has_the_negative_number_as_its_exit_code(anywhere):
    assert python(anywhere, "import os\nos.abort()").exit_code == -signal.SIGABRT


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(100)"])
def test_an_endless_program_ends_at_its_wall_clock_limit(anywhere, code):
    result = python(anywhere, code, wall_s=0.5)
    assert result.status is Outcome.TIMEOUT
    assert 0.5 <= result.seconds < 5


def test_processor_time_counts_over_all_processes_together(anywhere):
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    result = python(anywhere, code, cpu_s=1.0, wall_s=60.0)
    assert result.status is Outcome.TIMEOUT
    assert result.seconds < 20  # of eight processes that share cores with other tests


def test_processor_time_ends_a_program_that_has_wall_clock_left(anywhere):
    for _ in range(3):
        result = asyncio.run(anywhere.run({}, ["sh", "-c", "while :; do :; done"], limits=limits(cpu_s=0.5, wall_s=30)))
        assert result.status is Outcome.TIMEOUT


def test_who_ignores_signals_is_ended_all_the_same(anywhere):
    code = """
import signal
for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
    assert python(anywhere, code, wall_s=0.5).status is Outcome.TIMEOUT
    assert python(anywhere, code, wall_s=9.0, cpu_s=1.0).status is Outcome.TIMEOUT


def test_a_fork_bomb_stays_within_its_processes_and_dies(anywhere):
    code = """
import os, time
print("started", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
    marker = f"vime_bomb_{os.getpid()}_{time.monotonic_ns()}"
    bounds = limits(wall_s=4.0, cpu_s=60.0, processes=20)
    result = asyncio.run(anywhere.run({"main.py": code}, ["python3", "main.py", marker], limits=bounds))
    assert (result.status, result.stdout) == (Outcome.TIMEOUT, "started\n")
    assert left_over(marker) == []


def test_the_number_of_processes_is_bounded(anywhere):
    code = """
import subprocess, sys
n = 0
try:
    while n < 100:
        subprocess.Popen(["sleep", "30"])
        n += 1
except OSError:
    print(n)
"""
    assert 5 <= int(python(anywhere, code, processes=10).stdout) <= 10


def test_a_memory_hog_gets_a_memory_error_at_the_limit_of_one_process(anywhere):
    result = python(anywhere, f"x = bytearray({300 * MIB})")
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


def test_a_memory_hog_of_many_processes_is_killed_at_the_limit_of_all_together(anywhere):
    code = f"import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'x' * {80 * MIB})\ntime.sleep(10)"
    assert python(anywhere, code, wall_s=9.0).status is Outcome.MEMORY


def test_memory_that_processes_could_share_counts_too(anywhere):
    code = f"""
import mmap, os, time
for _ in range(3): os.fork()
memory = mmap.mmap(-1, {80 * MIB})
for at in range(0, len(memory), 4096): memory[at] = 1
time.sleep(10)
"""
    assert python(anywhere, code, wall_s=9.0).status is Outcome.MEMORY


def test_shared_memory_of_system_v_is_bounded():
    code = f"import ctypes\nprint(ctypes.CDLL(None).shmget(0, ctypes.c_size_t({300 * MIB}), 0o600))"
    result = python(sandbox("namespaces"), code)
    if not os.access("/proc/sys/kernel/shmall", os.W_OK):
        pytest.skip("/proc/sys is read-only here")
    assert result.stdout == "-1\n"


def test_processor_time_of_orphans_that_have_ended_counts(anywhere):
    code = """
import os, time
while True:
    if os.fork() == 0:
        if os.fork() == 0:
            while time.process_time() < 0.1: pass
        os._exit(0)
    os.wait()
    time.sleep(0.3)
"""
    result = python(anywhere, code, cpu_s=1.0, wall_s=20.0)
    assert result.status is Outcome.TIMEOUT
    assert result.seconds < 18


def test_orphans_that_end_all_the_time_do_not_keep_the_watcher_from_looking(anywhere):
    code = f"""
import os, subprocess, time
spawn = "while :; do (/bin/true &) ; done"
shells = [subprocess.Popen(["sh", "-c", spawn], stderr=subprocess.DEVNULL) for _ in range(3)]
for _ in range(2): os.fork()
x = bytearray(b"x" * {80 * MIB})
time.sleep(60)
"""
    result = python(anywhere, code, cpu_s=100.0, wall_s=60.0)
    assert result.status is Outcome.MEMORY


def test_one_large_file_ends_at_the_limit_of_the_disk(anywhere):
    code = f"f = open('large', 'wb')\nfor _ in range(100): f.write(b'x' * {MIB})\nf.flush()"
    result = python(anywhere, code, disk_bytes=8 * MIB)
    assert not result.ok
    assert result.status is Outcome.DISK or "OSError" in result.stderr or result.exit_code == -signal.SIGXFSZ


def test_many_files_cannot_fill_the_disk(anywhere):
    code = f"""
for i in range(50):
    with open(f"file{{i}}", "wb") as f:
        f.write(b"x" * {MIB})
"""
    result = python(anywhere, code, disk_bytes=8 * MIB)
    assert not result.ok
    assert result.status is Outcome.DISK or "No space left" in result.stderr


def test_the_number_of_files_is_bounded(anywhere):
    code = "for i in range(20000): open(f'file{i}', 'w').close()"
    result = python(anywhere, code, files=100)
    assert not result.ok
    assert result.status is Outcome.DISK or "No space left" in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut_and_ends_the_program(anywhere, stream):
    result = python(anywhere, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", output_bytes=5000, wall_s=60.0)
    assert result.status is Outcome.OUTPUT
    assert len(getattr(result, stream)) == 5000
    assert result.seconds < 20


def test_output_up_to_the_limit_is_kept_whole(anywhere):
    result = python(anywhere, "print('x' * 4999)", output_bytes=5000)
    assert (result.ok, len(result.stdout)) == (True, 5000)


def test_output_that_is_no_text_is_replaced_not_refused(anywhere):
    assert python(anywhere, "import sys\nsys.stdout.buffer.write(b'a\\xff')").stdout == "a\ufffd"


def test_a_daemon_that_forked_twice_dies_with_the_program(anywhere):
    marker = f"vime_daemon_{os.getpid()}_{time.monotonic_ns()}"
    code = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        os.execvp("python3", ["python3", "-c", "import time; time.sleep(60) # {marker}"])
    os._exit(0)
os.wait()
import time; time.sleep(0.3)
print("gone")
"""
    result = python(anywhere, code)
    assert (result.ok, result.stdout) == (True, "gone\n")
    assert result.seconds < 5
    assert left_over(marker) == []


def test_the_environment_holds_nothing_of_ours(anywhere, monkeypatch):
    monkeypatch.setenv("VIME_SECRET", "swordfish")
    result = python(anywhere, "import os\nprint(sorted(os.environ))")
    assert result.ok
    assert "SECRET" not in result.stdout
    assert "PYTHONPATH" not in result.stdout


PEEK = """
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="without root and namespaces the code has our own user")
def test_nobody_reads_our_environment_from_proc(anywhere):
    child = subprocess.Popen(["sleep", "30"], env={"VIME_SECRET": "swordfish"})
    try:
        result = python(anywhere, PEEK)
    finally:
        child.kill()
        child.wait()
    assert result.ok
    assert "PATH" in result.stdout  # its own
    assert "swordfish" not in result.stdout


def test_files_of_the_machine_and_its_processes_cannot_be_seen(shut_in, tmp_path):
    (tmp_path / "secret").write_text("swordfish")
    tmp_path.chmod(0o755)
    code = f"""
import os
for path in ({str(tmp_path / "secret")!r}, {__file__!r}, "/etc/shadow", "/etc/hostname", "/sys", "/home", "/var"):
    print(os.path.exists(path))
print(max(int(name) for name in os.listdir("/proc") if name.isdigit()))
"""
    *seen, highest = python(shut_in, code).stdout.split()
    assert set(seen) == {"False"}
    assert int(highest) < 10


def test_nothing_can_be_written_outside_of_its_own_directories(shut_in):
    name = f"vime-written-{os.getpid()}"
    code = f"""
import sys
for path in ("/tmp/{name}", "/usr/{name}", "/dev/shm/{name}", sys.prefix + "/{name}"):
    try:
        open(path, "w").close()
        print("written")
    except OSError as error:
        print(error.errno)
"""
    result = python(shut_in, code)
    own, system, shared, prefix = result.stdout.split()
    assert (own, shared) == ("written", "written")  # a /tmp and /dev/shm of its own, gone with it
    assert system != "written"
    assert prefix != "written"
    for place in ("/tmp", "/usr", "/dev/shm", sys.prefix):
        assert not (Path(place) / name).exists()


def test_a_read_only_file_system_cannot_be_made_writable_again(shut_in):
    result = asyncio.run(shut_in.run({}, ["mount", "-o", "remount,rw,bind", "/usr"]))
    assert not result.ok


CONNECT = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2)
    print("connected")
except OSError as error:
    print("refused", error.errno)
"""


def test_there_is_no_network(shut_in):
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = python(shut_in, CONNECT.format(port=server.getsockname()[1]))
    assert result.ok
    assert result.stdout.startswith("refused")


def test_without_namespaces_there_is_a_network_as_the_page_says():
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = python(sandbox("process"), CONNECT.format(port=server.getsockname()[1]))
    assert result.stdout == "connected\n"


def test_privileges_are_gone_for_good(anywhere):
    code = """
import os
for line in open("/proc/self/status"):
    if line.startswith(("CapPrm", "CapEff", "NoNewPrivs")):
        print(int(line.split()[1], 16))
try:
    os.setuid(0)
except OSError:
    print("no")
"""
    result = python(anywhere, code)
    assert result.stdout.split() == ["0", "0", "1", "no"]


def test_the_first_process_and_the_watcher_can_be_neither_killed_nor_traced(shut_in):
    code = """
import ctypes, os, signal
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))
try:
    os.listdir("/proc/1/fd")
except PermissionError:
    print("hidden")
"""
    result = python(shut_in, code)
    assert (result.status, result.stdout.split()) == (Outcome.EXITED, ["-1", "hidden"])


UNPRIVILEGED = """
import asyncio, sys
sys.path.insert(0, {root!r})
from vime.sandbox import Limits, LocalSandbox
async def main():
    for isolation in ("user_namespaces", "process"):
        where = LocalSandbox(isolation)
        for code in ({daemon!r}, {bomb!r}):
            limits = Limits(wall_s=1.0 if code == {bomb!r} else 30.0, processes=20)
            result = await where.run({{"main.py": code}}, ["python3", "main.py", {marker!r}], limits=limits)
            print(result.status.value, result.stdout.split())
asyncio.run(main())
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(60)
    os._exit(0)
os.wait()
print("gone")
"""
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="root alone can become another")
def test_a_user_without_privileges_has_it_too():
    """Run by the system's Python, because others may not read ours."""
    marker = f"vime_unprivileged_{os.getpid()}_{time.monotonic_ns()}"
    root = str(Path(__file__).resolve().parents[2])
    code = UNPRIVILEGED.format(root=root, daemon=DAEMON, bomb=BOMB, marker=marker)
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    if "version_info" in ended.stderr or "SandboxError" in ended.stderr or "ImportError" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[-1])
    assert ended.stdout.splitlines() == ["exited ['gone']", "timeout []"] * 2, ended.stderr
    assert left_over(marker) == []


def test_what_is_unreadable_is_cleaned_up_too(anywhere, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_to_all(tmp_path)
    python(anywhere, "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)")
    assert list(tmp_path.iterdir()) == []


def test_cleaning_up_changes_nothing_of_the_folder_that_holds_the_directories(anywhere, tmp_path, monkeypatch):
    """Also where the watcher, which is told to stop here, was faster."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_to_all(tmp_path)
    mode = tmp_path.stat().st_mode
    assert python(anywhere, "while True: print('x' * 1000)", output_bytes=5000).status is Outcome.OUTPUT
    assert (list(tmp_path.iterdir()), tmp_path.stat().st_mode) == ([], mode)


@pytest.mark.parametrize("files", [{"../a": ""}, {"/a": ""}, {"a/../../b": ""}, {"": ""}])
def test_a_path_that_leaves_the_directory_is_refused(files):
    with pytest.raises(ValueError, match="relative path"):
        asyncio.run(LocalSandbox().run(files, ["true"]))


def test_a_file_that_is_larger_than_the_disk_is_the_callers_result_not_an_error(shut_in):
    result = asyncio.run(shut_in.run({"large": b"x" * MIB}, ["true"], limits=limits(disk_bytes=MIB // 2)))
    assert result.status is Outcome.DISK


async def test_a_run_that_is_cancelled_leaves_nothing():
    marker = f"vime_cancelled_{os.getpid()}"
    for isolation in ISOLATIONS:
        where = LocalSandbox(isolation)
        running = asyncio.create_task(where.run({}, ["sh", "-c", f"sleep 60; : {marker}"], limits=limits(wall_s=60)))
        async with asyncio.timeout(20):
            while not (left_over(marker) or running.done()):  # noqa: ASYNC110  done: it does not work here
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert left_over(marker) == []


def test_who_dies_while_code_runs_takes_it_along(anywhere, tmp_path):
    marker = f"vime_orphan_{os.getpid()}_{time.monotonic_ns()}"
    program = f"""
import asyncio
from vime.sandbox import *
where = LocalSandbox({anywhere._isolation!r})
asyncio.run(where.run({{}}, ["sh", "-c", "(setsid sleep 60 &) ; sleep 60; : {marker}"], limits=Limits(wall_s=60)))
"""
    open_to_all(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    below = {}
    while len(below) < 4 and parent.poll() is None:
        time.sleep(0.05)
        below = _descendants(parent.pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) >= 4
    assert not [pid for pid in below if psutil.pid_exists(pid)]
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_who_dies_before_the_watcher_begins_leaves_nothing_either(anywhere, tmp_path):
    program = f"""
import asyncio, os, psutil
from vime.sandbox import *
async def main():
    running = asyncio.create_task(LocalSandbox({anywhere._isolation!r}).run({{}}, ["sleep", "60"]))
    while not psutil.Process().children():
        await asyncio.sleep(0)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    open_to_all(tmp_path)
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=60)
    deadline = time.monotonic() + 20
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


async def test_a_cancel_that_comes_while_the_process_is_ended_is_not_lost():
    async with stubborn("trap '' TERM; echo; sleep 60 >&- 2>&-") as process:
        ending = asyncio.create_task(_end(process))
        await asyncio.sleep(0.1)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert process.returncode == -signal.SIGKILL


async def test_a_process_has_ended_whoever_still_holds_its_output(monkeypatch):
    monkeypatch.setattr(local, "_GRACE_S", 0.2)
    async with stubborn("(trap '' TERM; exec sleep 60) & trap '' TERM; echo; wait") as process:
        async with asyncio.timeout(20):
            await _end(process)
        assert process.returncode == -signal.SIGKILL


@contextlib.asynccontextmanager
async def stubborn(script):
    """A process that does not end when it is told; it has begun."""
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=-1, stderr=-1, start_new_session=True)
    try:
        await process.stdout.readline()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)


async def test_threads_that_others_keep_do_not_hold_it_up():
    release = threading.Event()
    pool = ThreadPoolExecutor(max_workers=1)
    asyncio.get_running_loop().set_default_executor(pool)
    kept = pool.submit(release.wait)
    try:
        async with asyncio.timeout(30):
            assert (await LocalSandbox("process").run({}, ["true"])).ok
        assert not kept.done()
    finally:
        release.set()


async def test_only_so_many_run_at_one_time():
    where = LocalSandbox(concurrency=1)
    await where.isolation()
    start = time.monotonic()
    results = await asyncio.gather(*(where.run({}, ["sleep", "0.3"]) for _ in range(3)))
    assert all(result.ok for result in results)
    assert time.monotonic() - start > 0.9


async def test_the_strongest_that_works_is_chosen_and_the_weakest_is_told(caplog):
    chosen = await LocalSandbox().isolation()
    assert chosen in ISOLATIONS
    assert ("no namespaces" in caplog.text) == (chosen == "process")


WHICH = """
import asyncio
from vime.sandbox import LocalSandbox
async def main():
    where = LocalSandbox()
    result = await where.run({}, ["python3", "-c", "print(open('/proc/self/status').read())"])
    capabilities = {line for line in result.stdout.splitlines() if line.startswith(("CapEff", "CapBnd"))}
    print(await where.isolation(), sorted(int(line.split()[1], 16) for line in capabilities))
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give its capabilities away")
@pytest.mark.parametrize(
    ("command", "chosen"),
    [
        (["setpriv", "--bounding-set=-sys_admin"], "user_namespaces"),  # root in most containers
        (["unshare", "-r"], "user_namespaces"),  # root in name only, who can become nobody else
        (["unshare", "-r", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"', "sh"], "process"),
    ],
)
def test_root_with_less_than_all_capabilities_has_the_next_best(command, chosen):
    ended = subprocess.run([*command, sys.executable, "-c", WHICH], capture_output=True, text=True, timeout=60)
    if "unshare: " in ended.stderr and not ended.stdout:
        pytest.skip(ended.stderr)
    assert ended.stdout == f"{chosen} [0, 0]\n", ended.stderr
    assert ("it can reach the network" in ended.stderr) == (chosen == "process")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("wall_s", value) for value in (0, -1.0, float("nan"), float("inf"), 1e19, True, "5", 10**400)),
        ("cpu_s", 1e19),
        *(("memory_bytes", value) for value in (1e9, 0, 1 << 63, True)),
        *(("disk_bytes", 1 << 70), ("processes", 8.0), ("output_bytes", 1e6), ("files", -1)),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"(a whole number|a number) above 0 .* not {name}=") as error:
        Limits(**{name: value})
    assert len(str(error.value)) < 200


def test_the_largest_limits_hold_anywhere(anywhere):
    whole = dict.fromkeys(("memory_bytes", "disk_bytes", "files", "processes", "output_bytes"), MOST)
    assert python(anywhere, "print(1)", wall_s=MOST_SECONDS, cpu_s=MOST_SECONDS, **whole).stdout == "1\n"


@pytest.mark.parametrize(("name", "value"), [("memory_bytes", 1e9), ("memory_bytes", 1 << 63), ("cpu_s", 1e30)])
def test_what_fails_before_the_program_begins_is_the_sandboxs_failure(anywhere, name, value):
    impossible = limits()
    object.__setattr__(impossible, name, value)  # as if it had not been checked
    with pytest.raises(SandboxError, match=r"TypeError|OverflowError"):
        asyncio.run(anywhere.run({}, ["true"], limits=impossible))


@pytest.mark.parametrize(("files", "command"), [({"\ud800": ""}, ["true"]), ({"a\0": ""}, ["true"]), ({}, ["\ud800"])])
def test_names_and_words_that_the_system_cannot_have_are_refused(files, command):
    with pytest.raises(ValueError, match=r"half a character|that is text"):
        asyncio.run(LocalSandbox().run(files, command))


def test_a_file_may_have_a_name_that_is_no_unicode_and_a_thousand_parts(anywhere):
    deep = "a/" * 1000 + "b"
    files = {os.fsdecode(b"\xff"): "1", deep: "2"}
    result = asyncio.run(anywhere.run(files, ["sh", "-c", f"cat ./* {deep}"], limits=limits(files=2000)))
    assert (result.ok or "Is a directory" in result.stderr, result.stdout) == (True, "12")


DEEP = """
import os
for i in range(30):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
for i in range(12):
    with open(str(i), "wb") as file:
        file.write(b"x" * (2 << 20))
"""


def test_files_count_whose_path_is_too_long_for_the_kernel(anywhere):
    result = python(anywhere, DEEP, disk_bytes=8 * MIB)
    assert not result.ok
    assert result.status is Outcome.DISK or "No space left" in result.stderr


NESTED = """
import os
for i in range(1010):
    os.mkdir("d")
    os.chdir("d")
os.symlink("/tmp", "link")
open("file", "w").close()
for i in range(1010):
    os.chdir("..")
    os.chmod("d", 0)
print("nested")
"""


def test_a_thousand_directories_in_each_other_are_counted_and_removed(anywhere, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_to_all(tmp_path)
    result = python(anywhere, NESTED + "import time\ntime.sleep(0.3)", files=2000)
    assert (result.status, result.stdout) == (Outcome.EXITED, "nested\n")
    assert list(tmp_path.iterdir()) == []


def test_directories_in_each_other_count_as_files():
    result = python(sandbox("process"), NESTED, files=500)
    assert result.status is Outcome.DISK


def test_what_killed_runs_have_left_is_removed_by_the_next_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_to_all(tmp_path)
    names = ("vime-sandbox-left", "vime-sandbox-held", "vime-sandbox-young", "other-sandbox-left")
    for name in names:
        (tmp_path / name / "below").mkdir(parents=True)
        hours = 0 if "young" in name else 2
        os.utime(tmp_path / name, times=(time.time() - 3600 * hours,) * 2)
    (tmp_path / "vime-sandbox-link").symlink_to(tmp_path / "other-sandbox-left")
    held = os.open(tmp_path / "vime-sandbox-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert asyncio.run(LocalSandbox("process").run({}, ["true"])).ok
    finally:
        os.close(held)
    assert {each.name for each in tmp_path.iterdir()} == {*names[1:], "vime-sandbox-link"}


def test_a_run_holds_its_directory(anywhere, tmp_path, monkeypatch):
    """So that another that starts meanwhile spares it, however old it is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local, "_LEFT_S", -1.0)
    open_to_all(tmp_path)

    async def main():
        running = asyncio.create_task(anywhere.run({"a": "1"}, ["sh", "-c", "sleep 1; cat a"], limits=limits()))
        while not list(tmp_path.iterdir()):  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert (await LocalSandbox("process").run({}, ["true"])).ok
        return await running

    assert asyncio.run(main()).stdout == "1"
