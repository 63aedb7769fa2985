"""Instructions of IFBench and IFEval, by the checks of if-verifiable where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from vime.config.sections.reward import BUILT_IN, WITHOUT_LABEL
from vime.errors import UserError
from vime.rewards import GraderProcessPool, registry
from vime.types import GradeStatus

MISSING = 'the grader ifbench needs the package if-verifiable, which is not installed: pip install "vime[ifbench]"'

installed = pytest.mark.skipif(importlib.util.find_spec("if_verifiable") is None, reason="the extra ifbench is missing")


def words(low, high):
    return {"instruction_id_list": ["count:word_count_range"], "kwargs": [{"min_words": low, "max_words": high}]}


def grade(response, metadata):
    return registry.load("ifbench")(response, None, metadata)


def test_without_the_package_there_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "vime.rewards.ifbench", raising=False)
    with pytest.raises(UserError, match=f"^{MISSING.replace('[', '.').replace(']', '.')}$"):
        registry.load("ifbench")


def test_flags_and_graders_agree_on_what_there_is():
    assert set(BUILT_IN) == {*registry.LOCAL, registry.REMOTE}
    assert {name for name in BUILT_IN if not registry.needs_label(name)} == set(WITHOUT_LABEL)


def test_the_page_names_every_grader():
    text = (Path(__file__).resolve().parents[2] / "docs" / "en" / "advanced" / "rewards.md").read_text(encoding="utf-8")
    assert all(f"\n| `{name}` |" in text for name in BUILT_IN)


@installed
@pytest.mark.parametrize(
    ("response", "score"), [("one two three", 1.0), ("one", 0.0), ("<think>a b c d e f</think>one two", 1.0)]
)
def test_a_response_follows_an_instruction_or_not(response, score):
    assert grade(response, words(2, 4)).score == score


@installed
def test_all_instructions_must_be_followed_and_the_rest_is_told():
    names = ["punctuation:no_comma", "count:word_count_range"]
    both = {"instruction_id_list": names, "kwargs": [{}, {"min_words": 2, "max_words": 3}]}
    found = grade("one, two", both)
    assert (found.score, found.detail) == (0.0, "not followed: punctuation:no_comma")
    assert found.extra == {"loose": 0.0, "fraction": 0.5, "loose_fraction": 0.5}
    loose = grade("Sure, here it is:\none two", both)
    assert loose.extra == {"loose": 1.0, "fraction": 0.0, "loose_fraction": 1.0}, "without its first line it follows"
    assert grade("one two", both).extra == {"loose": 1.0, "fraction": 1.0, "loose_fraction": 1.0}


@installed
@pytest.mark.parametrize(
    ("metadata", "detail"),
    [
        ({}, 'metadata["instruction_id_list"] must be a list of names, not None'),
        ({"instruction_id_list": ["a"]}, 'metadata["kwargs"] must be a list of objects, not None'),
        (words(1, 2) | {"kwargs": []}, 'metadata["kwargs"] has 0 entries for 1 instructions'),
        (
            words(1, 2) | {"instruction_id_list": ["count:word_range"]},
            "there is no instruction 'count:word_range'; did you mean 'count:word_count_range'?",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_an_error_and_no_zero(metadata, detail):
    found = grade("one", metadata)
    assert (found.status, found.detail) == (GradeStatus.ERROR, detail)


@installed
def test_data_of_nltk_is_never_downloaded_but_asked_for(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("a download"))
    monkeypatch.delitem(sys.modules, "vime.rewards.ifbench", raising=False)
    for module in [name for name in sys.modules if name.startswith("if_verifiable.ifbench")]:
        monkeypatch.delitem(sys.modules, module)
    found = grade("the a", {"instruction_id_list": ["ratio:stop_words"], "kwargs": [{"percentage": 50}]})
    assert found.status is GradeStatus.ERROR
    assert found.detail == "an instruction needs data of NLTK: python -m nltk.downloader stopwords"


@installed
async def test_it_runs_in_a_grader_process_within_its_memory():
    pool = GraderProcessPool(1, 20.0, preload=["ifbench"], memory_limit_bytes=registry.address_space(["ifbench"]))
    try:
        await pool.start()
        assert (await pool.grade("ifbench", "one two", None, words(2, 4))).score == 1.0
        assert (await pool.grade("boxed_ifbench", r"\boxed{one two}, I think", None, words(2, 2))).score == 1.0
    finally:
        await pool.close()


@installed
def test_nothing_else_of_the_package_would_be_downloaded_by_now():
    """``_no_downloads`` is needed as long as importing the checks asks NLTK for data."""
    import inspect

    from if_verifiable.ifbench import instructions_util

    assert inspect.getsource(instructions_util).count("\ndownload_nltk_resources()\n") == 1
