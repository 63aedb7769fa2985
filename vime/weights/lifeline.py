"""The connection between the trainer and a process of an engine that tells each at once when the other is gone.

Collective operations do not tell: NCCL waits for a dead process for ever, gloo until its deadline. A TCP connection
ends with the process that holds it, so whoever waits for a collective operation looks at its lifelines meanwhile. They
also carry the few words of a transfer, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import time
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["Lifeline", "PeerLost", "wait_for_any"]

MAX_LINE_BYTES = 1 << 24
KEEP_ALIVE_S = 10  # idle until the kernel asks a silent machine whether it lives; three times, 5 s apart


class PeerLost(RuntimeError):
    """The other side is gone, said that it failed, or did not answer in time. The message says which of these.

    ``interrupted``: it lives, and gave up because of somebody else.
    """

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.interrupted = interrupted


class Lifeline:
    """One end of a connection.

    Args:
        name: how messages call the other side.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._socket = connection
        self._unread = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    @classmethod
    def to(cls, address: str, port: int, name: str, *, timeout_s: float) -> Lifeline:
        """Raises PeerLost if nobody listens there."""
        try:
            return cls(socket.create_connection((address, port), timeout_s), name)
        except OSError as error:
            raise PeerLost(f"{name} cannot be reached at {address}:{port}: {error}") from None

    @property
    def own_address(self) -> str:
        """The address of this machine on the network that leads to the other side."""
        address: str = self._socket.getsockname()[0]
        return address

    def send(self, **message: Any) -> None:
        """Raises PeerLost if the other side is gone."""
        try:
            self._socket.settimeout(60.0)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerLost(f"{self.name} is gone: {error}") from None

    def receive(self, *, timeout_s: float, since: float | None = None) -> dict[str, Any]:
        """The next message. Raises PeerLost if there is none in time, or if it says that the other side failed.

        Args:
            since: when the time began, of ``time.monotonic``; now if left out.
        """
        deadline = (time.monotonic() if since is None else since) + timeout_s
        while (message := self.received()) is None:
            if time.monotonic() >= deadline:
                raise PeerLost(f"{self.name} sent no answer within {timeout_s:g} s")
            wait_for_any([self], deadline - time.monotonic())
        return message

    def received(self) -> dict[str, Any] | None:
        """The next message if it is there. Does not wait; raises PeerLost like ``receive``."""
        while b"\n" not in self._unread:
            if not self._read():
                return None
        line, _, rest = self._unread.partition(b"\n")
        message = self._parsed(line)  # that the other side failed stays to be heard again
        self._unread = rest
        return message

    def check(self) -> None:
        """Does not wait. Raises PeerLost if the other side is gone or said that it failed."""
        while self._read():
            pass
        self._look_for_failure()

    def fail(self, reason: str, *, interrupted: bool = False) -> None:
        """Tells the other side, if it is still there, that nothing more will come."""
        with contextlib.suppress(PeerLost):
            self.send(failed=reason, interrupted=interrupted)

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Below 0 once it is closed."""
        return self._socket.fileno()

    def _look_for_failure(self) -> None:
        for line in self._unread.split(b"\n")[:-1]:
            self._parsed(line)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise PeerLost(f"{self.name} sends nonsense")
        if "failed" in message:
            interrupted = bool(message.get("interrupted"))
            raise PeerLost(f"{self.name} failed: {message['failed']}", interrupted=interrupted)
        return message

    def _read(self) -> bool:
        """Reads what there is; False if nothing came."""
        try:
            self._socket.settimeout(0.0)
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            raise PeerLost(f"{self.name} is gone: {error}") from None
        if not data:
            self._look_for_failure()  # its last words say more
            raise PeerLost(f"{self.name} is gone: it closed the connection")
        self._unread += data
        if len(self._unread) > MAX_LINE_BYTES:
            raise PeerLost(f"{self.name} sends nonsense")
        return True


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_for_any(connections: Iterable[HasFileno], timeout_s: float) -> None:
    """Returns when there is something to read on any of them, one is closed, or the time is up.

    With ``poll``, because ``select`` knows no descriptor above 1023, and a large run has more.
    """
    poller = select.poll()
    for connection in connections:
        if (descriptor := connection.fileno()) < 0:
            return
        poller.register(descriptor, select.POLLIN)
    poller.poll(math.ceil(1000 * max(0.0, timeout_s)))
