"""The process between us and untrusted code: ``python -I -S jail.py SPEC_FD REPORT_FD``. Standard library only.

It reads what to run as JSON, shuts it in, watches it, and reports as JSON lines. Three processes at most:

* the watcher (this one) stays outside, polls what its descendants use, and kills them all at the first excess;
* the first process of a new pid namespace builds the file system that the command sees and waits for it; when it
  ends, by itself or killed, the kernel kills everything else in the namespace;
* the command, without privileges. Where there are no namespaces it is the watcher's own child.

If our parent dies the watcher is told (SIGTERM) and everything ends; if the watcher dies, its child is killed.
Sources: namespaces(7), user_namespaces(7), pid_namespaces(7), pivot_root(2), mount_setattr(2), getrlimit(2), prctl(2).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the number is the same on all architectures
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITIES = 64

_POLL_S = 0.05
_POLL_SHARE = 0.1  # of a core, that watching may take
USERS = range(50_000, 60_000)  # within the 65,536 ids of a container; nobody has an account there
_USER_INSIDE = 1000  # what the user is called in a user namespace
_WORK = "sandbox"  # the working directory of the command, below the root of its file system
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Runs one command and reports how it ended."""
    spec_fd, report_fd = (int(word) for word in argv)
    os.set_inheritable(report_fd, False)
    try:
        with os.fdopen(spec_fd, "rb") as file:
            spec = json.load(file)
        _Watcher(spec, report_fd).run()
    except Exception as error:  # whatever it is, the command is not to blame
        _report(report_fd, error=_words(error))
        return 1
    return 0


def remove(directory: str) -> None:
    """Removes what a command left, however deep it is and also what it made unreadable; nothing behind links.

    Directories are moved to the top and emptied there, one after the other: no path grows too long for the kernel, and
    neither the stack nor the open files grow with the depth.

    Raises:
        OSError: something cannot be removed.
    """
    top = _opened(directory)
    try:
        waiting = _emptied(top, top)
        while waiting:
            name = waiting.pop()
            folder = _opened(name, top)
            try:
                waiting += _emptied(folder, top)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(directory)


def _emptied(folder: int, top: int) -> list[str]:
    """Removes the files in a directory, moves the directories in it to the top, and says what they are called there."""
    moved = []
    for name in os.listdir(folder):
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            continue
        new = name
        if folder != top:
            os.close(_opened(name, folder))  # what may not be written may not be moved
            new = os.urandom(16).hex()
            os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
        moved.append(new)
    return moved


def _opened(name: str, parent: int | None = None) -> int:
    """A directory, which we may change from now on."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        os.chmod(name, stat.S_IRWXU, dir_fd=parent)
        folder = os.open(name, _FOLDER, dir_fd=parent)
    os.fchmod(folder, stat.S_IRWXU)
    return folder


def _below(directory: str) -> Iterator[os.stat_result]:
    """Everything below a directory, however long its path: one open directory goes down and up again. What changes
    meanwhile may be missed; the next look sees it."""
    here = os.open(directory, _FOLDER)
    try:
        found, waiting = _listed(here)
        levels = [waiting]
        yield from found
        while levels:
            step = levels[-1].pop() if levels[-1] else ".."
            if step == "..":
                levels.pop()
            with contextlib.suppress(OSError):  # else it is gone
                there = os.open(step, _FOLDER, dir_fd=here)
                os.close(here)
                here = there
                if step != "..":
                    found, waiting = _listed(here)
                    levels.append(waiting)
                    yield from found
    finally:
        os.close(here)


def _listed(folder: int) -> tuple[list[os.stat_result], list[str]]:
    """What is in a directory, and the names of the directories among it."""
    names: list[str] = []
    found, folders = [], []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for name in names:
        with contextlib.suppress(OSError):
            found.append(os.lstat(name, dir_fd=folder))
            if stat.S_ISDIR(found[-1].st_mode):
                folders.append(name)
    return found, folders


class _Watcher:
    def __init__(self, spec: dict[str, Any], report_fd: int) -> None:
        self.spec = spec
        self.limits = spec["limits"]
        self.report_fd = report_fd
        self.namespaces = spec["isolation"] != "process"
        self.was_root = os.geteuid() == 0 and _is_mapped(USERS[0])  # else root in name only: nobody to become
        self.user = USERS[os.getpid() % len(USERS)] if self.was_root else os.geteuid()

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
        _write("/proc/self/oom_score_adj", "1000")  # the kernel takes us before anything of the training
        if self.spec["isolation"] == "user_namespaces":
            self._enter_user_namespace()
        elif self.namespaces:
            if not self.was_root:
                raise PermissionError(errno.EPERM, "this needs root, and other users that it can become")
            _call("unshare", _libc.unshare(_CLONE_NEWPID))
        else:
            _call("prctl", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        if not _told_of_end(self.spec["parent"], signal.SIGTERM):
            self._clean_up()
            return
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody of the same user may look into us
        watcher = os.getpid()
        child = os.fork()
        if child == 0:
            self._child(watcher)
        self._watch(child)

    def _enter_user_namespace(self) -> None:
        user = self.user
        if self.was_root:
            os.chown(self.spec["directory"], user, -1)  # to remove it, should it have to
            _become(user)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the maps below would belong to root
        group = os.getegid()
        _call("unshare", _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID))
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_USER_INSIDE} {user} 1"),
            ("gid_map", f"{_USER_INSIDE} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
        self.was_root, self.user = False, _USER_INSIDE

    # --- in the child ---------------------------------------------------------------------------------------------

    def _child(self, watcher: int) -> NoReturn:
        try:
            if self.namespaces:
                self._first_process()
            else:
                _die_with(watcher, signal.SIGKILL)
                self._fill(Path(self.spec["directory"]))
                self._execute(self.spec["directory"])
        except BaseException as error:
            self._report_failure(error)
        os._exit(1)

    def _report_failure(self, error: BaseException) -> None:
        """What fails before the command begins is no doing of the command."""
        if isinstance(error, MemoryError):
            _report(self.report_fd, killed="memory")
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG):
            _report(self.report_fd, killed="disk")
        else:
            _report(self.report_fd, error=_words(error))

    def _first_process(self) -> NoReturn:
        """Process 1 of the namespace: what we start here ends with us."""
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        namespaces = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
        _call("unshare", _libc.unshare(namespaces))
        _libc.sethostname(b"sandbox", 7)
        _write("/proc/sys/kernel/shmall", str(self.limits["memory_bytes"] // resource.getpagesize()))
        self._build_root(Path(self.spec["directory"]))
        command = os.fork()
        if command == 0:
            try:
                self._execute(f"/{_WORK}")
            except BaseException as error:
                self._report_failure(error)
            os._exit(1)
        while True:
            pid, status, usage = os.wait4(-1, 0)  # orphans of the command become ours
            if pid == command:
                self._report_end(status, usage)
                os._exit(0)

    def _build_root(self, root: Path) -> None:
        """A file system of its own: memory for what is written, and programs read-only. Nothing else is visible."""
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        size = f"size={self.limits['disk_bytes']},nr_inodes={self.limits['files'] + 1000},mode=0755"
        _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
        for path in self.spec["readable"]:
            _show(Path(path), root)
        for name in _DEVICES:
            _bind(Path("/dev") / name, root / "dev" / name)
        os.symlink("/proc/self/fd", root / "dev/fd")
        os.mkdir(root / "proc")
        with contextlib.suppress(OSError):  # a container whose own /proc is masked may not; the directory stays empty
            _mount("proc", root / "proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        for name in ("etc", _WORK, "tmp", "dev/shm"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "etc/passwd").write_text(f"sandbox:x:{self.user}:{self.user}::/{_WORK}:/bin/sh\n")
        (root / "tmp").chmod(0o1777)
        (root / "dev/shm").chmod(0o1777)
        self._fill(root / _WORK)
        os.chdir(root)
        _call("pivot_root", _libc.pivot_root(b".", b"."))
        _call("umount2", _libc.umount2(b".", _MNT_DETACH))
        os.chdir("/")

    def _fill(self, directory: Path) -> None:
        made = {directory}
        for name, content in self.spec["files"].items():
            path = directory / name
            for parent in reversed(Path(name).parents):  # not by recursion: a name may have a thousand parts
                (directory / parent).mkdir(exist_ok=True)
                made.add(directory / parent)
            path.write_bytes(base64.b64decode(content))
            made.add(path)
        if self.was_root:
            for path in made:
                os.chown(path, self.user, self.user)

    def _execute(self, directory: str) -> NoReturn:
        os.setsid()
        os.chdir(directory)
        command, environment = self.spec["command"], {**self.spec["environment"], "HOME": directory}
        self._set_limits()
        if self.was_root:
            watcher = os.getppid()
            _become(self.user)
            if not self.namespaces:  # the change of user has cleared it
                _die_with(watcher, signal.SIGKILL)
        for capability in range(_CAPABILITIES):  # or the next program of a root in name would have them again
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        _call("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        try:
            os.execvpe(command[0], command, environment)
        except (OSError, ValueError) as error:
            os.write(2, f"sandbox: cannot run {command[0]}: {error}\n".encode())
            os._exit(127)

    def _set_limits(self) -> None:
        limits = self.limits
        cpu = math.ceil(limits["cpu_s"])
        processes = limits["processes"]
        if self.spec["isolation"] == "user_namespaces":
            processes += 2  # the watcher and process 1 have the same user
        elif not self.was_root:
            processes += _threads_of(self.user)  # without a namespace the kernel counts all that the user has
        _limit(resource.RLIMIT_AS, limits["memory_bytes"])
        _limit(resource.RLIMIT_CPU, cpu + 1, cpu + 2)  # the watcher, which counts all processes, is to be the first
        _limit(resource.RLIMIT_FSIZE, limits["disk_bytes"])
        _limit(resource.RLIMIT_NPROC, processes)
        _limit(resource.RLIMIT_NOFILE, 256)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_MEMLOCK, 0)
        os.umask(0o022)

    # --- in the watcher -------------------------------------------------------------------------------------------

    def _watch(self, child: int) -> None:
        start, killed = time.monotonic(), None
        end, look = start + self.limits["wall_s"], start + _POLL_S
        while not killed and not self._ended(child):
            pause = max(0.0, min(look, end) - time.monotonic())
            told = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, pause)
            now = time.monotonic()
            if told is not None and told.si_signo == signal.SIGTERM:
                killed = "stopped"
            elif now >= end:
                killed = "timeout"
            elif now >= look:  # also when children end all the time
                killed = self._excess()
                seen = time.monotonic()
                look = seen + max(_POLL_S, (seen - now) / _POLL_SHARE)
        seconds = time.monotonic() - start
        self._kill_all(child)
        if not killed and not self.namespaces and self._disk_is_full():  # what it did since the last look
            killed = "disk"
        # Nobody is left who would clean up. That may be so even if our parent is still the same: the kernel tells us of
        # its end when the first of its threads ends.
        if killed == "stopped" or os.getppid() != self.spec["parent"]:
            self._clean_up()
        _report(self.report_fd, seconds=seconds, **({"killed": killed} if killed else {}))

    def _clean_up(self) -> None:
        with contextlib.suppress(OSError):
            remove(self.spec["directory"])

    def _ended(self, child: int) -> bool:
        """Reaps what has ended. True when the child is among it."""
        ended = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return ended
            if pid == child:
                ended = True
                if not self.namespaces:
                    self._report_end(status, usage)

    def _report_end(self, status: int, usage: resource.struct_rusage) -> None:
        code = os.waitstatus_to_exitcode(status)
        used_up = usage.ru_utime + usage.ru_stime >= self.limits["cpu_s"]
        if code == -signal.SIGXCPU or (used_up and code == -signal.SIGKILL):
            _report(self.report_fd, killed="timeout")
        else:
            _report(self.report_fd, code=code)

    def _excess(self) -> str | None:
        """Which limit all descendants together have passed."""
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)  # orphans that became ours and have ended
        cpu_s, memory = reaped.ru_utime + reaped.ru_stime, 0
        for pid, cpu in _descendants(os.getpid()).items():
            cpu_s += cpu
            memory += _own_bytes(pid)
        if cpu_s > self.limits["cpu_s"]:
            return "timeout"
        if memory > self.limits["memory_bytes"]:
            return "memory"
        if not self.namespaces and self._disk_is_full():
            return "disk"
        return None

    def _disk_is_full(self) -> bool:
        used = count = 0
        with contextlib.suppress(OSError):  # it has removed its directory
            for found in _below(self.spec["directory"]):
                count += 1
                used += found.st_blocks * 512 if not stat.S_ISDIR(found.st_mode) else 0
                if used > self.limits["disk_bytes"] or count > self.limits["files"] + len(self.spec["files"]):
                    return True
        return False

    def _kill_all(self, child: int) -> None:
        if self.namespaces:
            _kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)  # returns when the namespace is empty
            return
        while descendants := _descendants(os.getpid()):
            for number in (signal.SIGSTOP, signal.SIGKILL):  # who is stopped cannot fork away
                for pid in descendants:
                    _kill(pid, number)
            self._ended(child)
            time.sleep(0.002)


def _descendants(ancestor: int) -> dict[int, float]:
    """Process id → seconds of CPU, with those of its children that have ended; of all below ``ancestor``."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            seconds[int(name)] = sum(int(field) for field in fields[11:15]) / tick
    found = {ancestor}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        grew = bool(more)
        found |= more
    return {pid: seconds[pid] for pid in found if pid != ancestor}


def _own_bytes(pid: int) -> int:
    """Resident memory but for files: what it allocated, and what it shares with others but is in no file."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))


def _threads_of(user: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _show(path: Path, root: Path) -> None:
    """Makes a path of the machine visible below ``root``, read-only; what we may not see ourselves is left out."""
    target = root / path.relative_to("/")
    if not os.access(path, os.R_OK) or os.path.lexists(target):
        return
    if path.is_symlink() and path.parent == Path("/"):  # /bin is /usr/bin on most systems
        os.symlink(os.readlink(path), target)
        return
    _bind(path, target)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_long(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_long(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_long(ctypes.sizeof(attributes)),
    )
    _call(f"mount_setattr {path}", result)


def _bind(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _mount(source: Path | str | None, target: Path | str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    _call(f"mount {target}", _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _is_mapped(user: int) -> bool:
    """Whether the user namespace that we are in has that user."""
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _die_with(parent: int, number: int) -> None:
    if not _told_of_end(parent, number):
        os._exit(1)


def _told_of_end(parent: int, number: int) -> bool:
    """Asks for a signal when our parent dies. False: it died before we asked."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() == parent


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    """Sets a limit, which is never more than the one that we were given ourselves."""
    _, ours = resource.getrlimit(what)
    most = [limit if ours == resource.RLIM_INFINITY else min(limit, ours) for limit in (soft, hard or soft)]
    resource.setrlimit(what, (most[0], most[1]))


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).write_text(text)


def _call(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _words(error: BaseException) -> str:
    """One line, short enough for a pipe to take at once."""
    if isinstance(error, OSError) and error.strerror:
        words = f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    else:
        words = f"{type(error).__name__}: {error}"
    return " ".join(words.split())[:500]


def _report(fd: int, **record: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # our parent died; there is still work to do
        os.write(fd, (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
