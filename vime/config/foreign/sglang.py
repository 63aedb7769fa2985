"""Flags of another engine's command line that users bring along, and what says the same here."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "sglang-"

_SPECULATION = "vllm-speculative-config"

INSTEAD: Mapping[str, str] = {
    "mem-fraction-static": "vllm-gpu-memory-utilization",
    "context-length": "vllm-max-model-len",
    "router-ip": "vllm-router-ip",
    "router-port": "vllm-router-port",
    "router-policy": "router-policy",
    "server-concurrency": "vllm-server-concurrency",
    "model-path": "hf-checkpoint",
    "tp-size": "rollout-num-gpus-per-engine",
    "tensor-parallel-size": "rollout-num-gpus-per-engine",
    "dp-size": "rollout-num-gpus",
    "data-parallel-size": "rollout-num-gpus",
    "ep-size": "vllm-enable-expert-parallel",
    "expert-parallel-size": "vllm-enable-expert-parallel",
    "enable-ep-moe": "vllm-enable-expert-parallel",
    "max-running-requests": "vllm-max-num-seqs",
    "chunked-prefill-size": "vllm-max-num-batched-tokens",
    "page-size": "vllm-block-size",
    "disable-radix-cache": "no-vllm-enable-prefix-caching",
    "disable-cuda-graph": "vllm-enforce-eager",
    "cuda-graph-bs": "vllm-cudagraph-capture-sizes",
    "cuda-graph-max-bs": "vllm-max-cudagraph-capture-size",
    "speculative-algorithm": _SPECULATION,
    "speculative-draft-model-path": _SPECULATION,
    "speculative-num-steps": _SPECULATION,
    "speculative-num-draft-tokens": _SPECULATION,
    "random-seed": "rollout-seed",
    "trust-remote-code": "trust-remote-code",
    "log-requests": "vllm-enable-log-requests",
}
"""Names without prefix and dashes, on both sides."""


def advice(name: str, vllm: Mapping[str, object]) -> str | None:
    """What to give instead of a flag; None where it is not of that engine. ``vllm``: the flags that vLLM has."""
    if not name.startswith(PREFIX):
        return None
    inner = name.removeprefix(PREFIX)
    same = f"vllm-{inner}" if inner in vllm else None
    known = INSTEAD.get(inner, same)
    return f"use --{known}" if known else "its flags are --vllm-X, X being one of vLLM's API server"
