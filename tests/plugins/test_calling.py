"""Users' functions fail by themselves, whatever they raise, and nobody waits for one that will not end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.plugins import odd
from vime.errors import UserError
from vime.plugins import Hook, HookError
from vime.plugins.calling import MOST_CHARS, OutOfTime, Raised, guarded, in_time, raised, said
from vime.plugins.loading import load_function


@pytest.mark.parametrize(("function", "told"), odd.PLAIN.items(), ids=lambda value: getattr(value, "__name__", ""))
async def test_what_a_hook_raises_is_its_failure_plain_or_not(function, told) -> None:
    with pytest.raises(HookError) as caught:
        Hook(lambda: function(), "--rollout-sample-filter-path", "my:f").call(about="rollout 2")
    assert str(caught.value).startswith(f"--rollout-sample-filter-path my:f: {told}")
    assert str(caught.value).endswith(", for rollout 2")

    async def coroutine() -> None:
        function()

    with pytest.raises(HookError) as caught:
        await Hook(coroutine, "--custom-generate-function-path", "my:f").acall(about="sample 3", timeout_s=5.0)
    assert str(caught.value).startswith(f"--custom-generate-function-path my:f: {told}")


@pytest.mark.parametrize("function", [odd.awaits_what_it_cancelled, odd.cancels_itself])
async def test_a_cancellation_within_a_function_is_not_one_of_the_run(function) -> None:
    with pytest.raises(HookError, match=r"my:f: raised CancelledError \(\w+.py:\d+\), for sample 3"):
        await Hook(function, "--custom-generate-function-path", "my:f").acall(about="sample 3")


async def test_a_cancellation_from_outside_passes_and_lets_the_function_end_in_order() -> None:
    ended = []

    async def orderly() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.ensure_future(Hook(orderly, "--custom-generate-function-path", "my:f").acall(about="sample 3"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_an_interrupt_in_a_coroutine_or_a_thread_is_the_function_s_but_in_plain_code_it_is_an_interrupt() -> None:
    async def coroutine() -> None:
        odd.interrupts()

    with pytest.raises(Raised):
        await in_time(coroutine)
    found = []

    def in_thread() -> None:
        try:
            with guarded():
                odd.interrupts()
        except BaseException as error:
            found.append(type(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found == [Raised]
    with pytest.raises(KeyboardInterrupt), guarded():
        odd.interrupts()


async def test_a_coroutine_that_swallows_its_cancellation_is_left_behind_at_its_deadline(monkeypatch) -> None:
    hook = Hook(odd.will_not_end, "--custom-generate-function-path", "my:f")
    async with odd.stubbornness(monkeypatch):
        with pytest.raises(OutOfTime):
            await in_time(odd.will_not_end, 0.01)
        with pytest.raises(HookError, match=r"my:f: did not return within --limit-s 0.01, for sample 3"):
            await hook.acall(about="sample 3", timeout_s=0.01, limit="--limit-s")


def test_a_module_that_parses_its_own_arguments_at_import_cannot_be_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "parses_at_import.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        load_function("parses_at_import:f", "--custom-rm-path")
    assert str(caught.value) == ("--custom-rm-path parses_at_import:f: cannot import parses_at_import (SystemExit: 2)")


def test_what_an_exception_says_is_one_line_of_limited_length() -> None:
    assert said(ValueError("a\n b")) == "a b"
    assert len(said(ValueError("x" * 10**7))) == MOST_CHARS + 2
    assert raised(ValueError("a")) == "raised ValueError: a"
