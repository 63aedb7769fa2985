"""The example of docs/en/advanced/sandbox.md runs and prints what it says."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/en/advanced/sandbox.md"


def test_the_example_prints_what_stands_beside_it(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    exec(code, {})
    assert capsys.readouterr().out.strip() == re.search(r"print\(.*# (.*)$", code, re.MULTILINE)[1]
