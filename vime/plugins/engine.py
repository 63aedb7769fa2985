"""A stand-in for the router and its engines, for trials of functions that generate: it answers as they do, at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/inference/v1/generate"
LENGTH = 5
"""Tokens of an answer, unless max_tokens are fewer."""


@contextmanager
def synthetic_engine() -> Iterator[tuple[str, int]]:
    """Address and port of a server that answers ``POST /inference/v1/generate``, on loopback while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield "127.0.0.1", server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        from vime.serving import answers  # needs NumPy; the contracts are read where flags are explained

        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != PATH:
            self._answer(404, _error(f"the synthetic engine of check-plugin answers POST {PATH} alone"))
            return
        try:
            request = json.loads(body)
            token_ids, max_tokens = request["token_ids"], int(request["sampling_params"]["max_tokens"])
            if not token_ids or not all(isinstance(token, int) for token in token_ids):
                raise ValueError("token_ids must be a list of whole numbers, and not empty")
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, _error(f"the request cannot be read: {error!r}"))
            return
        length, ended = min(max_tokens, LENGTH), max_tokens > LENGTH
        if answers.MEDIA_TYPE in self.headers.get("Accept", ""):
            self._answer(200, packed_generation(length, ended=ended))
        else:
            self._answer(200, generation(length, ended=ended))

    def do_GET(self) -> None:
        self._answer(404, _error(f"the synthetic engine of check-plugin answers POST {PATH} alone"))

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 - silent
        return

    def _answer(self, status: int, content: dict[str, Any] | bytes) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def packed_generation(length: int, *, ended: bool) -> bytes:
    """The same as ``generation`` for clients that accept packed numbers, as ours does."""
    tokens, log_probs = list(range(40, 40 + length)), [-0.5] * length
    from vime.serving import answers

    return answers.encode(tokens, log_probs, [{"version": "1", "start": 0, "end": length}], _reason(ended))


def generation(length: int, *, ended: bool) -> dict[str, Any]:
    """What vLLM answers: tokens 40, 41, …, each with its log-prob, sampled by weights of version 1."""
    return {
        "choices": [
            {
                "index": 0,
                "token_ids": list(range(40, 40 + length)),
                "logprobs": {"content": [{"logprob": -0.5} for _ in range(length)]},
                "weight_versions": [{"version": "1", "start": 0, "end": length}],
                "finish_reason": _reason(ended),
            }
        ]
    }


def _reason(ended: bool) -> str:
    return "stop" if ended else "length"


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
