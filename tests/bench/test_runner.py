"""A measure runs in a process of its own and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from bench.sides import Side, SideDied

RUN = """
import json, sys
from pathlib import Path
from bench.measures import Entry
from bench.runner import adopt_orphans, run_measure
adopt_orphans()
entry = Entry(name=sys.argv[1], target="", timeout_s=float(sys.argv[2]), package="tests.bench.fakes")
print(json.dumps(run_measure(entry, Path(sys.argv[3]))))
"""


def run_fake(name: str, folder: Path, timeout_s: float = 60) -> dict[str, Any]:
    """In another process, because the runner ends all children of the one that it runs in."""
    command = [sys.executable, "-c", RUN, name, str(timeout_s), str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def test_the_result_is_what_the_measure_returned_whatever_it_printed(tmp_path: Path) -> None:
    assert run_fake("works", tmp_path) == {"value": 2.0, "folder_exists": True}
    assert "noise on stdout" in (tmp_path / "works.log").read_text()


def test_a_measure_that_raises_gives_its_last_words(tmp_path: Path) -> None:
    assert run_fake("breaks", tmp_path)["error"].endswith("RuntimeError: the wheel came off")


def test_a_measure_that_hangs_is_ended_with_all_its_descendants(tmp_path: Path) -> None:
    assert run_fake("hangs", tmp_path, timeout_s=10)["error"].startswith("not finished within 10 s")
    assert not psutil.pid_exists(int((tmp_path / "hangs" / "pid").read_text()))


ECHO = """
from bench.protocol import SideChannel
channel = SideChannel()
print("noise on stdout")
channel.reply(ready=True)
for request in channel.requests():
    channel.reply(seconds=request.get("n", 0.5))
"""


def test_a_side_answers_each_request_by_one_line(tmp_path: Path) -> None:
    with Side([sys.executable, "-c", ECHO], tmp_path / "echo.log") as side:
        assert side.ready() == {"ready": True}
        assert side.ask(n=3) == {"seconds": 3}
        assert side.seconds() == 0.5
        assert side.last == {"seconds": 0.5}


def test_a_side_that_dies_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Side([sys.executable, "-c", "raise SystemExit('no memory')"], tmp_path / "echo.log") as side:
        try:
            side.ready()
        except SideDied as error:
            assert "echo ended with code 1" in str(error)
            assert "no memory" in str(error)
        else:
            raise AssertionError("it did not raise")
