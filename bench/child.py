"""The process of one measure: `python -m bench.child MODULE FOLDER` prints the result as JSON; the rest is stderr's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from bench.protocol import SideChannel


def main() -> None:
    module, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    channel = SideChannel()
    channel.reply(**importlib.import_module(module).measure(folder))


if __name__ == "__main__":
    main()
