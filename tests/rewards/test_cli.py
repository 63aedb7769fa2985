"""``vime grade`` from the command line."""

import json
import subprocess
import sys

import pytest

from vime.cli.main import main


def run(text, *flags):
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from vime.cli.main import main; sys.exit(main())", "grade", *flags],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_one_line_out_for_each_line_in_and_in_order():
    records = [{"response": f"it is {i}", "label": i if i % 2 else -1} for i in range(50)]
    code, rows, _ = run(lines(*records), "--rm-type", "last_number", "--workers", "2")
    assert code == 0
    assert [row["score"] for row in rows] == [float(i % 2) for i in range(50)]
    assert rows[5] == {"score": 1.0, "status": "scored", "detail": "5"}


def test_a_bad_line_is_one_error_row_and_exit_1():
    text = lines({"response": "1", "label": 1}) + "{broken\n\n" + lines({"label": 2}, {"response": "2", "label": 2})
    code, rows, _ = run(text, "--rm-type", "last_number")
    assert code == 1
    assert [row["status"] for row in rows] == ["scored", "error", "error", "scored"]
    assert rows[1]["detail"].startswith("line 2: not JSON")
    assert rows[2]["detail"].startswith('line 4: expected an object with "response"')


def test_an_answer_that_hangs_does_not_hold_up_the_rest():
    text = lines({"response": r"\boxed{9**9**9**9}", "label": "1"}, {"response": r"\boxed{2}", "label": "2"})
    code, rows, _ = run(text, "--rm-type", "math", "--deadline", "1")
    assert code == 0
    assert rows[0] == {"score": None, "status": "error", "detail": "deadline of 1 s exceeded"}
    assert rows[1]["score"] == 1.0


def test_an_unknown_grader_is_one_line_and_exit_1(capsys):
    assert main(["grade", "--rm-type", "mth"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --rm-type: there is no grader 'mth'")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("rm_type", ["remote_rm", "boxed_remote_rm"])
def test_a_service_cannot_be_asked_from_here(rm_type, capsys):
    assert main(["grade", "--rm-type", rm_type]) == 1
    assert "asks a service" in capsys.readouterr().err
