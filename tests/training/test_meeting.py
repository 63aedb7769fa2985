"""Where the trainer's ranks meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from tests.tiny import make_model
from tests.training.harness import config_of, started


def test_the_first_rank_listens_on_the_address_that_the_others_got_alone(tmp_path: Path) -> None:
    config, before = config_of(make_model(tmp_path / "model", "llama")), listening()
    with started(config):
        assert {address.ip for address in listening() - before} == {"127.0.0.1"}


def listening() -> set[Any]:
    """Where this process listens."""
    return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
