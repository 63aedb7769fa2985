"""What is left behind holds up nobody, not even the end of the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio
from vime.rollout import tasks

tasks.CANCEL_S = 0.1

async def catches_everything():
    while True:
        try:
            await asyncio.sleep(3600)
        except:
            continue

async def main():
    asyncio.create_task(catches_everything())
    await asyncio.sleep(0.01)
    return 7

with tasks.event_loop() as runner:
    status = runner.run(main())
raise SystemExit(status)
"""


def test_a_process_ends_although_a_coroutine_catches_whatever_ends_it() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=30, capture_output=True, text=True)
    assert ended.returncode == 7
    assert "is left behind" in ended.stderr
