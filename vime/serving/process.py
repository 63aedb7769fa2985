"""Server processes that cannot be left behind, and ports that stay free until their server takes them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.errors import UserError
from vime.files import writing

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 5.0  # from SIGTERM to SIGKILL; a server of ours has nothing to save
LAST_WORDS = 15  # lines of the log that a message shows
CAUSE_CHARACTERS = 400
CAUSES = ("Error:", "error:", "Exception:", "Value error,")  # the last one is pydantic's, and follows the others


class ServerProcess:
    """One server under a guard: it ends, with all its children, when this process ends in whatever way.

    Args:
        name: how messages call it.
        log: file that takes what it prints; an older one is replaced.
        environment: variables to set on top of this process's own.

    Raises:
        UserError: ``log`` cannot be written.
    """

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("wb")
        read, write = os.pipe()
        self._report = open(read, "rb", buffering=0)  # noqa: SIM115  lives as long as this object
        self._status: int | None = None
        self._reading = threading.Lock()
        arguments = [str(os.getpid()), str(GRACE_S), str(write)]
        with output, open(write, "wb"):
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *arguments, *command],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                start_new_session=True,  # Ctrl-C at the terminal reaches us alone, and we end it in order
            )

    @property
    def pid(self) -> int:
        """The guard's process id; all processes of the server descend from it."""
        return self._guard.pid

    def failure(self) -> str | None:
        """Why the server is gone, in its own last words; None while it runs."""
        return self._last_words() if self._has_ended(0) else None

    def ended(self) -> str:
        """Waits until the server is gone; returns its last words. Processes below it may still be ending."""
        self._has_ended(None)
        return self._last_words()

    def _has_ended(self, timeout_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self._report, select.POLLIN)
        return self._status is not None or bool(poller.poll(timeout_s))

    def _last_words(self) -> str:
        with self._reading:
            if self._status is None:
                self._status = int(self._report.read(16) or self._guard.wait())  # a guard that was killed says nothing
        return f"The end of {self.log}:\n{self.tail()}\n{self.name} ended with status {self._status}: {self.cause()}"

    def cause(self) -> str:
        """The last line of the log that looks like an error."""
        lines = [
            line.strip() for line in self._lines() if any(word in line for word in CAUSES) and " WARNING " not in line
        ]
        return lines[-1][:CAUSE_CHARACTERS] if lines else "no error in its log"

    def tail(self) -> str:
        return "\n".join(self._lines()[-LAST_WORDS:])

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []

    def stop(self) -> None:
        """Asks the server to end, and returns when its whole tree is gone: a little over ``GRACE_S`` later at most."""
        if self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
        self._guard.wait(GRACE_S + 10)


class ReservedPort:
    """A port that the kernel gives to nobody else until it is released, while a server of ours may listen on it.

    This works because a bound socket that does not listen leaves the port to others which, like it, allow reuse; vLLM
    and the router do. A port that is picked and let go may be taken before the server, seconds later, comes to it.

    Args:
        port: the port wanted; 0 for any.
        flag: the flag that names the port, for the message.

    Raises:
        UserError: a given port is in use.
    """

    def __init__(self, host: str, port: int = 0, *, flag: str = "the port") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise UserError(
                f"{flag}: port {port} of {host} cannot be used: {error.strerror}; give another one"
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()
