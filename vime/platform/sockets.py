"""Ports for servers that start a moment later."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

__all__ = ["LOOPBACK", "free_port"]

LOOPBACK = "127.0.0.1"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_FIRST = 32768  # of the ports that Linux gives to connections
LOWEST = 10_000
ATTEMPTS = 1000


def free_port(address: str = LOOPBACK) -> int:
    """A free port of an address of this machine, below those that the kernel gives to outgoing connections.

    A port that the kernel chooses is free now, but any connection of any process may get it before the server comes to
    listen there. NCCL alone opens dozens.

    Raises:
        OSError: the address is not one of this machine, or no port was found.
    """
    last = max(_first_ephemeral(), LOWEST + 1000)
    for _ in range(ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((address, random.randrange(LOWEST, last)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, f"{address} has no free port from {LOWEST} to {last}")


def _first_ephemeral() -> int:
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL_FIRST
