import subprocess
import time
from pathlib import Path
from typing import Any


def measure(folder: Path) -> dict[str, Any]:
    """Starts a process in a session of its own, which a signal to the group does not reach, and never ends."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "pid").write_text(str(child.pid))
    time.sleep(600)
    return {}
