"""How an engine of ours answers a generation request: tokens and log-probs as packed numbers, routes as they are.

vLLM's own answer holds one JSON object a token, 151 bytes of it, and an engine that serves hundreds of requests spends
more time writing them than its device needs for the tokens. The packed answer takes 11 bytes a token, and no work.
Routes, where they are wanted, are a hundred times as much (a byte for each layer and expert), so they are written and
read without a step in between: the answer is one line of JSON, and behind it the routes as they lie in memory.

Both ends import this module; it needs neither vLLM nor torch.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import orjson

MEDIA_TYPE = "application/vnd.vime.generation"  # a request that accepts it gets it; any other gets vLLM's answer
GENERATE = "/inference/v1/generate"
PROGRESS = "/vime/v1/progress"
TOKEN_DTYPE = np.dtype("<i4")
LOG_PROB_DTYPE = np.dtype("<f4")  # what the engine computes them in


class Span(TypedDict):
    """Tokens ``start`` up to ``end`` of the response were sampled with the weights of one version."""

    version: str
    start: int
    end: int


class Array(TypedDict):
    """Numbers that stand behind the line of JSON, in C order."""

    dtype: str
    shape: list[int]


class Answer(TypedDict):
    """The line of JSON. T is the number of sampled tokens."""

    finish_reason: str
    token_ids: str  # base64 of T TOKEN_DTYPE
    log_probs: str  # base64 of T LOG_PROB_DTYPE, nats; not finite where the engine's was not
    weight_versions: list[Span]  # without gaps
    routed_experts: Array | None  # [prompt + T - 1, layers, top-k], from where they were wanted on, if the engine
    # records them; uint8, or uint16 from 257 experts on; zeros for layers without experts


def encode(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    weight_versions: list[Span],
    finish_reason: str,
    routed_experts: np.ndarray[Any, Any] | None = None,
) -> bytes:
    """The body of an answer."""
    routes = None if routed_experts is None else np.ascontiguousarray(routed_experts)
    answer: Answer = {
        "finish_reason": finish_reason,
        "token_ids": _packed(token_ids, TOKEN_DTYPE),
        "log_probs": _packed(log_probs, LOG_PROB_DTYPE),
        "weight_versions": weight_versions,
        "routed_experts": None if routes is None else {"dtype": routes.dtype.str, "shape": list(routes.shape)},
    }
    line = orjson.dumps(answer)
    return line if routes is None else b"".join((line, b"\n", routes.data.cast("B") if routes.size else b""))


def decode(content: bytes) -> Any:
    """The fields of an ``Answer``, with the routes as an array that shares the memory of ``content``.

    Whatever is no answer comes back as it is, or as its text: ``client.parse_generation`` refuses it.
    """
    end = content.find(b"\n")
    try:
        answer = orjson.loads(content if end < 0 else memoryview(content)[:end])
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")
    if isinstance(answer, dict) and isinstance(answer.get("routed_experts"), dict):
        answer["routed_experts"] = _behind(content, end + 1, **answer["routed_experts"])
    return answer


def _behind(content: bytes, start: int, dtype: str, shape: list[int]) -> np.ndarray[Any, Any] | None:
    """None: there are not as many bytes as there should be."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not start or len(content) - start != size:
        return None
    return np.frombuffer(content, dtype, offset=start).reshape(shape) if size else np.zeros(shape, dtype)


def unpacked(text: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The numbers in a packed field, [T]. Raises ValueError if the text is not base64 of whole numbers."""
    return np.frombuffer(binascii.a2b_base64(text, strict_mode=True), dtype)


def _packed(values: Sequence[float], dtype: np.dtype[Any]) -> str:
    return binascii.b2a_base64(np.asarray(values, dtype).tobytes(), newline=False).decode()
