"""A plain function runs in a thread that nobody has to wait for."""

import asyncio
import subprocess
import sys
import time

import pytest

from tests.rollout.fakes import FakeSource
from vime.plugins.hook import Hook, HookError
from vime.rollout.hooks import custom_rollout
from vime.threads import in_thread


async def test_result_and_error_come_back():
    assert await in_thread(lambda: 3, name="t") == 3
    with pytest.raises(KeyError, match="lost"):
        await in_thread(lambda: {}["lost"], name="t")
    with pytest.raises(RuntimeError, match="the function raised StopIteration"):
        await asyncio.wait_for(in_thread(lambda: next(iter([])), name="t"), 5)


def test_a_function_that_does_not_return_keeps_no_process_alive():
    program = (
        "import asyncio, time\n"
        "from vime.threads import in_thread\n"
        "async def main():\n"
        "    async with asyncio.timeout(0.1):\n"
        "        await in_thread(lambda: time.sleep(600), name='t')\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith("TimeoutError")


async def test_a_rollout_function_has_a_deadline_and_is_named():
    def rollout(args, rollout_id, data_source, evaluation):
        time.sleep(30)

    hook = Hook(rollout, "--rollout-function-path", "mine:rollout")
    collect = custom_rollout(hook, None, FakeSource(), timeout_s=0.05)
    begin = asyncio.get_running_loop().time()
    message = "mine:rollout: did not return within --rollout-function-timeout-s 0.05, for rollout 4"
    with pytest.raises(HookError, match=message):
        await collect(3)
    assert asyncio.get_running_loop().time() - begin < 20
