"""Run these tests on functions of your own, without GPU, Ray or vLLM:

python -m pytest tests/plugin_contracts --custom-rm-path my_module:my_reward

Any flag that names a function may be given, several times too; --args holds further flags of the run, in one string.
Without any, the examples of the documentation are tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.plugins import CONTRACTS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("custom functions")
    for contract in CONTRACTS.values():
        group.addoption(contract.flag, action="append", metavar="package.module:function", help=contract.purpose)
    group.addoption("--args", default="", help="further flags of the run, which custom functions see as args")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "flag" not in metafunc.fixturenames:
        return
    given = [
        (contract.flag, path)
        for contract in CONTRACTS.values()
        for path in metafunc.config.getoption(contract.flag, default=None) or []
    ]
    examples = [(contract.flag, contract.example) for contract in CONTRACTS.values()]
    metafunc.parametrize(("flag", "path"), given or examples, ids=lambda word: word.removeprefix("--"))


@pytest.fixture
def further(request: pytest.FixtureRequest, tokenizer: Path) -> list[str]:
    """What the functions see as args; the examples need a tokenizer."""
    words: list[str] = request.config.getoption("--args", default="").split()
    return words or ["--hf-checkpoint", str(tokenizer)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder
