"""A custom function in use: called without another import, and named by what goes wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.plugins import Hook, HookError, WrongAnswer
from vime.plugins.hook import MOST_TRACEBACKS


def fails(args: object) -> None:
    raise ValueError("no\nanswer")


LINE = fails.__code__.co_firstlineno + 1


def test_an_exception_names_flag_function_line_and_subject_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "custom_functions.log"
    with pytest.raises(HookError) as caught:
        Hook(fails, "--custom-rm-path", "my:fails", log).call(None, about="sample 3")
    assert str(caught.value) == (
        f"--custom-rm-path my:fails: raised ValueError: no answer (test_hook.py:{LINE}), "
        f"traceback in {log}, for sample 3"
    )
    header, first, frame, *_ = log.read_text().splitlines()
    assert (header, first) == ("--custom-rm-path my:fails", "Traceback (most recent call last):")
    assert frame.endswith(f'test_hook.py", line {LINE}, in fails'), "our own frames are left out"


def test_a_function_that_always_fails_does_not_fill_the_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    hook = Hook(fails, "--custom-rm-path", "my:fails", log)
    for _ in range(MOST_TRACEBACKS + 5):
        with pytest.raises(HookError, match="traceback in"):
            hook.call(None, about="sample 3")
    assert log.read_text().count("Traceback") == MOST_TRACEBACKS


def test_a_log_that_cannot_be_written_hides_no_cause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hook = Hook(fails, "--custom-rm-path", "my:fails", tmp_path / "file" / "log")
    with pytest.raises(HookError, match=rf"no answer \(test_hook.py:{LINE}\), for sample 3"):
        hook.call(None, about="sample 3")


async def test_a_coroutine_function_is_awaited_and_its_answer_read() -> None:
    async def rewards(args: object) -> list[float]:
        return [1.0]

    def read(answer: list[float]) -> float:
        if len(answer) != 1:
            raise WrongAnswer("returned too much")
        return answer[0]

    assert await Hook(rewards, "--custom-rm-path", "my:rewards").acall(None, about="sample 3", read=read) == 1.0


def test_a_wrong_answer_is_told_like_an_exception_but_has_no_traceback(tmp_path: Path) -> None:
    def read(answer: object) -> None:
        raise WrongAnswer("returned 3 rewards for 4 samples")

    with pytest.raises(HookError) as caught:
        Hook(len, "--custom-reward-post-process-path", "my:f", tmp_path / "log").call([], about="rollout 2", read=read)
    assert str(caught.value) == (
        "--custom-reward-post-process-path my:f: returned 3 rewards for 4 samples, for rollout 2"
    )
    assert not (tmp_path / "log").exists()
