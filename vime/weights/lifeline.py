"""The connection between the trainer and a process of an engine that tells each at once when the other is gone.

Collective operations do not tell: NCCL waits for a dead process for ever, gloo until its deadline. A TCP connection
ends with the process that holds it, so whoever waits for a collective operation looks at its lifelines meanwhile. They
also carry the few words of a transfer, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

__all__ = ["Lifeline", "PeerLost"]

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

    def receive(self, *, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises PeerLost if there is none in time, or if it says that the other side failed."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not self._read(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise PeerLost(f"{self.name} sent no answer within {timeout_s:g} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return self._parsed(line)

    def check(self) -> None:
        """Does not wait. Raises PeerLost if the other side is gone or said that it failed."""
        while self._read(0.0):
            pass
        self._look_for_failure()

    def fail(self, reason: str, *, interrupted: bool = False) -> None:
        """Tells the other side, if it is still there, that nothing more will come."""
        with contextlib.suppress(PeerLost):
            self.send(failed=reason, interrupted=interrupted)

    def close(self) -> None:
        self._socket.close()

    def _look_for_failure(self) -> None:
        for line in self._unread.split(b"\n")[:-1]:
            self._parsed(line)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(line)
        if "failed" in message:
            interrupted = bool(message.get("interrupted"))
            raise PeerLost(f"{self.name} failed: {message['failed']}", interrupted=interrupted)
        return message

    def _read(self, timeout_s: float) -> bool:
        """Reads what there is; False if nothing came."""
        try:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return False
            data = self._socket.recv(1 << 16)
        except (OSError, ValueError) as error:
            raise PeerLost(f"{self.name} is gone: {error}") from None
        if not data:
            self._look_for_failure()  # its last words say more
            raise PeerLost(f"{self.name} is gone: it closed the connection")
        self._unread += data
        if len(self._unread) > MAX_LINE_BYTES:
            raise PeerLost(f"{self.name} sends nonsense")
        return True
