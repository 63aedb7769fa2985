"""What a person sees, on a terminal and in a log file."""

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

import vime
from vime.observe.console import text_console
from vime.observe.progress import Progress, sparkline
from vime.observe.summary import EvalRow, Summary, duration, eval_rows

METRICS = {
    "rollout/raw_reward": 0.4,
    "rollout/response_len/mean": 812.4,
    "rollout/response_len/max": 2048,
    "perf/tokens_per_gpu_per_sec": 1234.5,
    "train/train_rollout_logprob_abs_diff": 0.0123,
}


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def plain_console(width=200):
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def terminal(width=100):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def written(console):
    return console.file.getvalue().splitlines()


def shown(progress, width=100):
    """What the display looks like right now."""
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(progress._display())
    return console.export_text().splitlines()


def test_without_a_terminal_each_rollout_is_one_plain_line():
    console, clock = plain_console(), Clock()
    with Progress(10, clock=clock, console=console) as progress:
        clock.now += 5
        progress.update(METRICS, rollout_id=0)
    readings = "reward 0.400  length 812  max 2048  1,234 tokens/s/slot  log-prob difference 0.0123"
    assert written(console) == [f"rollout 1 of 10  {readings}  left 45.0 s"]


def test_without_a_terminal_a_phase_is_announced_once():
    console = plain_console()
    with Progress(2, clock=Clock(), console=console) as progress:
        for rollout_id in range(2):
            for name in ("generate", "train"):
                with progress.phase(name):
                    pass
            progress.update({}, rollout_id=rollout_id)
    assert written(console) == [
        "rollout 1 of 2: generate",
        "rollout 1 of 2: train",
        "rollout 1 of 2  left 0.0 s",
        "rollout 2 of 2",
    ]


def test_a_long_line_in_a_log_file_is_neither_wrapped_nor_cut():
    console = plain_console(width=40)
    Progress(1, clock=Clock(), console=console).log("x" * 100)
    assert written(console) == ["x" * 100]


def test_log_lines_are_text_not_markup():
    console = plain_console()
    Progress(1, clock=Clock(), console=console).log("[bold]answer[/] [0, 1]")
    assert written(console) == ["[bold]answer[/] [0, 1]"]


def test_what_follows_a_rollout_is_told_of_that_rollout():
    console = plain_console()
    with Progress(8, clock=Clock(), console=console) as progress:
        with progress.phase("evaluate"):
            pass
        for rollout_id in range(4):
            progress.update({}, rollout_id=rollout_id)
        with progress.phase("save"):
            assert shown(progress)[0].startswith("rollout 4 of 8")
        with progress.phase("train"):
            assert shown(progress)[0].startswith("rollout 5 of 8")
    assert [line for line in written(console) if ": " in line] == [
        "rollout 1 of 8: evaluate",
        "rollout 4 of 8: save",
        "rollout 5 of 8: train",
    ]


def test_the_command_that_goes_on_is_one_line_on_a_narrow_terminal():
    console, command = terminal(width=40), "python train.py " + "--a-flag 1 " * 20 + "--load 'a b'"
    with Progress(1, clock=Clock(), console=console) as progress:
        progress.finish(Summary(rollouts=1, steps=1, seconds=1, run_dir="runs/a", resume_command=command))
    assert f"Continue: {command}" in written(console)


def test_the_summary_of_a_resumed_run_counts_the_whole_run_and_says_what_is_new():
    console = plain_console()
    console.print(Summary(rollouts=8, steps=16, seconds=1, run_dir="a", earlier_rollouts=2, earlier_steps=4))
    text = console.file.getvalue()
    assert re.search(r"Rollouts +8, 6 of them since it was resumed", text)
    assert re.search(r"Optimizer steps +16, 12 of them since it was resumed", text)


def test_names_of_evaluation_sets_are_text():
    console = plain_console()
    console.print(Summary(rollouts=1, steps=1, seconds=1, run_dir="a", evals=(EvalRow(name="[bold]x :100: y[/]"),)))
    assert "[bold]x :100: y[/]" in console.file.getvalue()


def test_no_console_of_vime_reads_markup_or_emoji_in_what_it_prints(capsys):
    text_console().print("big.jsonl:100: [red]answer[/] [0, 1]")
    assert capsys.readouterr().out == "big.jsonl:100: [red]answer[/] [0, 1]\n"
    root = Path(vime.__file__).parent
    makers = [path.relative_to(root).as_posix() for path in root.rglob("*.py") if "Console(" in path.read_text()]
    assert makers == ["observe/console.py"]


def test_the_display_shows_phase_place_and_metrics():
    clock = Clock()
    progress = Progress(10, clock=clock, console=terminal())
    with progress.phase("generate"):
        progress.update({**METRICS, "rollout/raw_reward": 0.2}, rollout_id=0)
        clock.now += 14
        progress.update(METRICS, rollout_id=1)
        clock.now += 3
        first, second, third = shown(progress)
    assert first.startswith("rollout 3 of 10")
    assert "generate 17.0 s" in first
    assert "left 53.0 s" in first  # 7 s a rollout, 8 to go, the next one 3 s under way
    assert second.strip() == "reward 0.400  ▁█"
    assert third.strip() == "length 812  max 2048  1,234 tokens/s/slot  log-prob difference 0.0123"


@pytest.mark.parametrize("width", [20, 40, 200])
@pytest.mark.parametrize("metrics", [{}, METRICS, {"perf/step_time": 3.0}])
def test_the_display_keeps_its_height(width, metrics):
    progress = Progress(10, clock=Clock())
    progress.update(metrics, rollout_id=0)
    lines = shown(progress, width)
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)


def test_phases_may_overlap():
    progress = Progress(10, clock=Clock())
    with progress.phase("generate"):
        with progress.phase("train"):
            assert "generate 0.0 s, train 0.0 s" in shown(progress)[0]
        assert "train" not in shown(progress)[0]
    assert "waiting" in shown(progress)[0]


def test_a_phase_ends_also_when_it_fails():
    progress = Progress(10, clock=Clock(), console=plain_console())
    with pytest.raises(RuntimeError), progress.phase("train"):
        raise RuntimeError
    assert "waiting" in shown(progress)[0]


def test_a_resumed_run_counts_from_where_it_starts():
    clock = Clock()
    progress = Progress(10, clock=clock, start=8, console=plain_console())
    clock.now += 1000  # starting engines
    with progress.phase("generate"):
        clock.now += 6
    progress.update({}, rollout_id=8)
    first = shown(progress)[0]
    assert first.startswith("rollout 10 of 10")
    assert "left 6.0 s" in first


def test_metrics_that_are_not_finite_do_not_stop_the_display():
    progress = Progress(10, clock=Clock(), console=plain_console())
    progress.update(METRICS, rollout_id=0)
    progress.update({"rollout/raw_reward": math.nan, "perf/step_time": math.inf}, rollout_id=1)
    assert "reward 0.400" in shown(progress)[1]


def test_on_a_terminal_log_lines_stand_above_the_display():
    console = terminal()
    with Progress(10, clock=Clock(), console=console) as progress:
        progress.log("saved iter_0000003")
        progress.update(METRICS, rollout_id=0)
        summary = Summary(rollouts=1, steps=1, seconds=1, run_dir="runs/a")
        progress.finish(summary)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "saved iter_0000003" in text
    assert text.count("Results: runs/a") == 1


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1], ""), ([0, 0], "▁▁"), ([0, 1], "▁█"), ([0, 0.5, 1, 0.25], "▁▅█▃")],
)
def test_sparkline(values, line):
    assert sparkline(values) == line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (9.44, "9.4 s"), (185, "3:05"), (3725, "1:02:05"), (176400, "2 d 01:00:00")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_greedy_results_stand_next_to_the_sampled_ones():
    start = {"eval/math": 0.2, "eval/math-truncated_ratio": 0.0, "eval/math-greedy": 0.25}
    end = {"eval/math": 0.5, "eval/math-greedy": 0.625, "eval/code-greedy": 0.1}
    assert eval_rows(start, end) == (
        EvalRow(name="math", start=0.2, end=0.5, greedy_start=0.25, greedy_end=0.625),
        EvalRow(name="code-greedy", end=0.1),
    )


def test_the_summary_says_what_came_out_where_it_is_and_how_to_go_on():
    console = plain_console(width=90)
    Progress(40, clock=Clock(), console=console).finish(
        Summary(
            rollouts=40,
            steps=80,
            seconds=100,
            run_dir="runs/demo",
            evals=(EvalRow(name="math", start=0.25, end=0.5, greedy_start=0.3, greedy_end=0.625),),
            phase_seconds={"generate": 60, "train": 30},
            peak_memory_bytes=3 * 2**30,
            resume_command="python3 train.py --config run.yaml --load ckpt",
        )
    )
    text = console.file.getvalue()
    assert re.search(r"generate +1:00 \(60%\)", text)
    assert re.search(r"math +│ +0.250 │ +0.500 │ +\+0.250 │ +0.300 │ +0.625", text)
    assert "3.00 GiB" in text
    assert "Results: runs/demo" in text
    assert "Continue: python3 train.py --config run.yaml --load ckpt" in text
