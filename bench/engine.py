"""An engine and its router, as the measures start them: the classes of a real run, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.work import threads
from vime.config import Config
from vime.serving.engine import EngineServer


@contextmanager
def running_engine(config: Config, folder: Path) -> Iterator[str]:
    """The URL of one engine that computes on all cores."""
    server = EngineServer.from_config(config, index=0, threads=threads(), log_dir=folder)
    try:
        yield server.start()
    finally:
        server.stop()
