"""How an engine of ours answers a generation request: tokens and log-probs as packed numbers.

vLLM's own answer holds one JSON object a token, 151 bytes of it, and an engine that serves hundreds of requests spends
more time writing them than its device needs for the tokens. The packed answer takes 11 bytes a token, and no work.

Both ends import this module; it needs neither vLLM nor torch.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import orjson

MEDIA_TYPE = "application/vnd.vime.generation+json"  # a request that accepts it gets it; any other gets vLLM's answer
PROGRESS = "/vime/v1/progress"
TOKEN_DTYPE = np.dtype("<i4")
LOG_PROB_DTYPE = np.dtype("<f4")  # what the engine computes them in


class Span(TypedDict):
    """Tokens ``start`` up to ``end`` of the response were sampled with the weights of one version."""

    version: str
    start: int
    end: int


class Answer(TypedDict):
    """T is the number of sampled tokens."""

    finish_reason: str
    token_ids: str  # base64 of T TOKEN_DTYPE
    log_probs: str  # base64 of T LOG_PROB_DTYPE, nats; not finite where the engine's was not
    weight_versions: list[Span]  # without gaps
    routed_experts: str | None  # base64 of a .npy [prompt + T - 1, layers, top-k], from where they were wanted on, if
    # the engine records them; uint8, or uint16 from 257 experts on; zeros for layers without experts


def encode(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    weight_versions: list[Span],
    finish_reason: str,
    routed_experts: str | None = None,
) -> bytes:
    """The body of an answer."""
    answer: Answer = {
        "finish_reason": finish_reason,
        "token_ids": _packed(token_ids, TOKEN_DTYPE),
        "log_probs": _packed(log_probs, LOG_PROB_DTYPE),
        "weight_versions": weight_versions,
        "routed_experts": routed_experts,
    }
    return orjson.dumps(answer)


def unpacked(text: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The numbers in a packed field, [T]. Raises ValueError if the text is not base64 of whole numbers."""
    return np.frombuffer(binascii.a2b_base64(text, strict_mode=True), dtype)


def unpacked_array(text: str | None) -> np.ndarray[Any, Any]:
    """The array in a field. Raises ValueError, with what goes on after its name, if there is none."""
    if text is None:
        raise ValueError("are missing")
    try:
        array: np.ndarray[Any, Any] = np.load(io.BytesIO(binascii.a2b_base64(text)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"cannot be read ({error})") from None
    return array


def _packed(values: Sequence[float], dtype: np.dtype[Any]) -> str:
    return binascii.b2a_base64(np.asarray(values, dtype).tobytes(), newline=False).decode()
