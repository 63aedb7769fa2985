"""Ports for servers that start a moment later."""

from __future__ import annotations

import socket

import pytest

from vime.platform import sockets
from vime.platform.sockets import free_port


def test_no_connection_gets_a_port_that_was_found() -> None:
    first = int(sockets.EPHEMERAL.read_text().split()[0])
    assert all(sockets.LOWEST <= free_port() < first for _ in range(50))


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        taken = free_port()
        server.bind(("127.0.0.1", taken))
        server.listen()
        chosen = iter([taken, taken + 1, taken + 2, taken + 3])
        monkeypatch.setattr(sockets.random, "randrange", lambda low, high: next(chosen))
        assert free_port() > taken


def test_the_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
