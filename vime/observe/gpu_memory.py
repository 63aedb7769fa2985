"""Memory of GPUs as the driver tells it, for processes that do not use torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

__all__ = ["gpu_bytes"]

TIMEOUT_S = 20


def gpu_bytes(what: str, devices: Sequence[str] = ()) -> list[int]:
    """Of each GPU of this machine, or of those named; empty where there is none or the driver does not tell.

    Args:
        what: "total", or "used" by all processes together.
        devices: their numbers or ids, as CUDA_VISIBLE_DEVICES has them.
    """
    command = ["nvidia-smi", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits"]
    command += ["--id=" + ",".join(devices)] if devices else []
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
        return [int(line) << 20 for line in told.split()]  # MiB
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
