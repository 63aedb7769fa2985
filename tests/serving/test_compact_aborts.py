"""What an API server passes on of a request to abort; the rest of it needs an engine (test_api_servers.py)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vime.serving.compact import Peers


class Engine:
    """Notes what it is asked to abort."""

    def __init__(self) -> None:
        self.aborted: list[list[str]] = []
        self.output_processor = self
        self.request_states = {"running": None}

    async def abort(self, ids: list[str], internal: bool = False) -> None:
        self.aborted.append(ids)


def receiver(*messages: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left)

    return receive


def request(body: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": False}


@pytest.mark.parametrize(
    ("message", "none_means_all", "aborted"),
    [
        (request(b'{"request_ids": ["a", "b"]}'), True, [["a", "b"]]),
        (request(b'{"request_ids": ["a"]}'), False, [["a"]]),
        (request(b""), True, [["running"]]),
        (request(b"{}"), True, [["running"]]),
        (request(b"{}"), False, []),
        (request(b"{broken"), True, []),
        (request(b"[1]"), True, []),
        (request(b'{"request_ids": "a"}'), True, []),
        ({"type": "http.disconnect"}, True, []),
    ],
)
async def test_what_the_other_server_aborts(
    message: dict[str, Any], none_means_all: bool, aborted: list[list[str]], tmp_path: Any
) -> None:
    one, other = Engine(), Engine()
    peers = Peers(str(tmp_path), 2, one)
    Peers(str(tmp_path), 2, other)
    again = await peers.overhear(receiver(message), none_means_all)
    assert await again() == message, "vLLM reads what there was to read"
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert (one.aborted, other.aborted) == ([], aborted)


async def test_a_datagram_of_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    engine = Engine()
    Peers(str(tmp_path), 1, engine)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        monkeypatch.setattr("os.getuid", lambda: 12345)  # the kernel says who sent it: somebody else than this one
        stranger.sendto(b"[]", f"\0vime {tmp_path} 0")
        await asyncio.sleep(0.05)
    assert engine.aborted == []
