"""How a measure talks to a side that runs in a process of its own: JSON lines over stdin and stdout.

A side says once that it is ready, then answers each request line by one line. The end of stdin ends it. Standard
library only, because a side may live in another virtual environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class SideChannel:
    """The side's end. Whatever else the process prints goes to stderr from now on."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def reply(self, **fields: Any) -> None:
        self._answers.write(json.dumps(fields) + "\n")
        self._answers.flush()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Ends when the measure has closed its end."""
        for line in sys.stdin:
            yield json.loads(line)
