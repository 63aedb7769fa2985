"""What must hold before the first test module is imported, and after each test."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from hypothesis import settings

# Hypothesis draws the same examples in every run, and a busy machine is no failure.
settings.register_profile("vime", deadline=None, derandomize=True)
settings.load_profile("vime")

if not Path("/dev/nvidiactl").exists():
    # Without a GPU the tests run Triton's kernels in its interpreter. Triton reads this when it is imported, which
    # several packages do on their way.
    os.environ["TRITON_INTERPRET"] = "1"

MANY_DESCRIPTORS = 2_000


def pytest_runtest_logfinish() -> None:
    """Process groups that tests have left are garbage in cycles, each with threads and sockets: in thousands of tests
    they would use up all descriptors before Python looks for garbage by itself."""
    if len(os.listdir("/proc/self/fd")) > MANY_DESCRIPTORS:
        gc.collect()
