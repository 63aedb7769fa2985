"""``vime explain``: the table, the exit status, and that it is quick."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

from vime.cli.main import main


def test_right_flags_give_0_and_every_value_with_its_origin(flags, capsys):
    assert main(["explain", *flags("--lr", "2e-6")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "[optimizer]" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("--")}
    assert rows["--lr"] == ["2e-06", "command", "line"]
    assert rows["--min-lr"] == ["0.0", "default"]
    assert rows["--eps-clip-high"] == ["0.2", "derived:", "eps-clip"]


def test_columns_are_aligned(flags, capsys):
    main(["explain", *flags()])
    section = capsys.readouterr().out.split("[optimizer]\n")[1].split("\n\n")[0].splitlines()
    assert len({line.index("default") for line in section}) == 1


WRONG = ("--lr", "x", "--global-batch-size", "24", "--rollout-top-p", "0.9")
"""Two mistakes and a doubt."""


def test_mistakes_give_1_and_are_all_that_is_shown(flags, capsys):
    assert main(["explain", *flags(*WRONG)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["error", "error"]
    assert lines[0] == "error: --lr expects a number, not 'x'"
    assert lines[2:] == ["(vime explain FLAGS --table shows every value all the same)"]


def test_the_table_is_shown_before_mistakes_where_it_is_wanted(flags, capsys):
    assert main(["explain", *flags(*WRONG), "--table"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "[optimizer]" in lines
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "error"]


def test_doubts_come_after_the_table(flags, capsys):
    assert main(["explain", *flags("--rollout-top-p", "0.9")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("warning: --rollout-top-p 0.9: ")


def test_json_is_for_programs(flags, capsys):
    assert main(["explain", *flags("--seeed", "1"), "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert out["violations"] == ["unknown flag --seeed; did you mean --seed?"]
    assert out["config"]["rollout"]["rollout_batch_size"] == {"value": 8, "origin": "command line"}


def test_custom_functions_are_checked_too(flags, capsys):
    assert main(["explain", *flags("--custom-rm-path", "nowhere.reward:f")]) == 1
    assert capsys.readouterr().out.splitlines()[0] == (
        "error: --custom-rm-path nowhere.reward:f: cannot import nowhere.reward "
        "(ModuleNotFoundError: No module named 'nowhere')"
    )


def test_unknown_commands_name_the_nearest(capsys):
    assert main(["explane"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "error: vime has no command 'explane'; did you mean explain?"


def test_it_runs_as_a_module_quickly_and_imports_nothing_heavy(flags):
    script = (
        "import sys; from vime.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'vllm', 'megatron', 'ray', 'transformers', 'numpy'} & set(sys.modules);"
        "print('heavy:', sorted(heavy)); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, "explain", *flags("--vllm-max-num-seqs", "4", "--swiglu")],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime  # of a core, however busy all are
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert seconds < 1.5  # seen: 0.3 on an idle core


def test_python_m_vime(flags):
    words = [sys.executable, "-m", "vime", "explain", *flags("--lr", "x")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
