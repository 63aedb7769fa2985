"""What must hold before the first test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Without a GPU the tests run Triton's kernels in its interpreter. Triton reads this when it is imported, which
    # several packages do on their way.
    os.environ["TRITON_INTERPRET"] = "1"
