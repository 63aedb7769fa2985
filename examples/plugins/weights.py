"""What happens to weights on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def list_files(args: Any, version_dir: str, rollout_engines: list[str]) -> None:
    """Keeps a list of what was written, e.g. for a copy to the machines of the engines."""
    files = sorted(path for path in Path(version_dir).iterdir() if path.is_file())
    with (Path(args.run_dir) / "written.txt").open("a") as file:
        file.writelines(f"{path.name} {path.stat().st_size}\n" for path in files)
