"""A rank that dies while a checkpoint is saved fails the save of the others; nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.tiny import make_model
from tests.training.harness import free_port

SAVE_AND_DIE = """
import os, sys
from pathlib import Path
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from tests.checkpoints.learner import Learner, config_of
from vime.training.checkpoint import save_megatron
from vime.training.parallel import connect

rank, port, hf_dir, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
connect(config_of(hf_dir, "--fp32"), rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port)
learner = Learner(hf_dir, "--fp32")
if rank == 1:
    FileSystemWriter.write_data = lambda *_: os._exit(7)
try:
    save_megatron(folder, learner.chunks, learner.optimizer, learner.scheduler)
except Exception as error:
    print(f"failed: {type(error).__name__}", flush=True)
    os._exit(3)
"""


def test_the_save_fails_on_the_rank_that_is_left(tmp_path: Path) -> None:
    hf_dir, port = make_model(tmp_path / "hf"), free_port()
    (tmp_path / "checkpoint").mkdir()
    command = [sys.executable, "-c", SAVE_AND_DIE]
    arguments = [str(port), str(hf_dir), str(tmp_path / "checkpoint")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=180)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [3, 7]
    assert said[0].startswith("failed: ")
    assert time.monotonic() - began < 180
    assert not (tmp_path / "checkpoint" / "metadata.json").exists()  # nothing says that it is whole
