"""Where the trainer's ranks meet."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.tiny import make_model
from tests.training.harness import config_of, started


def test_the_first_rank_listens_on_the_address_that_the_others_got_alone(tmp_path: Path) -> None:
    with started(config_of(make_model(tmp_path / "model", "llama"))):
        listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
