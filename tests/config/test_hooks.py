"""Custom functions: found by path, checked against their contract, before anything starts."""

from __future__ import annotations

import pytest

from tests.config import sample_hooks
from vime.config import resolve
from vime.config.sections import Hooks as HookFlags
from vime.errors import UserError
from vime.plugins import CONTRACTS, Contract, Hooks, accepted_keywords, load_function, resolve_hooks
from vime.plugins import rollout as contracts

HERE = "tests.config.sample_hooks"


def function_of(hooks: Hooks, contract: Contract):
    hook = hooks.get(contract)
    return hook and hook.function


def problems(flags, *words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve_hooks(resolve(flags(*words)).config)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("path", [f"{HERE}:reward", f"{HERE}.reward"])
def test_a_colon_or_the_last_dot_separates_module_and_function(path):
    assert load_function(path, "--custom-rm-path") is sample_hooks.reward


def test_every_hook_flag_has_a_contract_and_every_contract_a_flag():
    assert set(HookFlags.__dataclass_fields__) == set(CONTRACTS)


def test_nothing_given_resolves_to_nothing(flags):
    hooks = resolve_hooks(resolve(flags()).config)
    assert all(hooks.get(contract) is None for contract in CONTRACTS.values())


def test_right_functions_are_resolved(flags):
    words = f"""
        --custom-rm-path {HERE}:reward --custom-generate-function-path {HERE}:generate
        --rollout-function-path {HERE}:rollout --data-source-path {HERE}:Source
        --rollout-sample-filter-path {HERE}:sample_filter --custom-rollout-log-function-path {HERE}:log
    """
    hooks = resolve_hooks(resolve(flags(*words.split())).config)
    assert function_of(hooks, contracts.CUSTOM_RM) is sample_hooks.reward
    assert function_of(hooks, contracts.DATA_SOURCE) is sample_hooks.Source
    assert function_of(hooks, contracts.EVAL_FUNCTION) is sample_hooks.rollout  # follows the rollout function


@pytest.mark.parametrize("name", ["reward_with_keywords", "reward_object"])
def test_keywords_and_callable_objects_are_fine(flags, name):
    hooks = resolve_hooks(resolve(flags("--custom-rm-path", f"{HERE}:{name}")).config)
    assert function_of(hooks, contracts.CUSTOM_RM) is getattr(sample_hooks, name)


@pytest.mark.parametrize(
    ("flag", "path", "message"),
    [
        ("--custom-rm-path", "reward", "expected package.module:function"),
        (
            "--custom-rm-path",
            "nowhere.reward:f",
            "cannot import nowhere.reward (ModuleNotFoundError: No module named 'nowhere')",
        ),
        ("--custom-rm-path", f"{HERE}:rewrad", f"{HERE} has no rewrad; did you mean reward?"),
        ("--custom-rm-path", f"{HERE}:NOT_CALLABLE", "NOT_CALLABLE is a int, which cannot be called"),
        ("--custom-rm-path", f"{HERE}:plain_reward", "it must be an async function (async def)"),
        (
            "--custom-rm-path",
            f"{HERE}:reward_of_one",
            "it is called with (args, sample), but its signature is (sample): too many positional arguments",
        ),
        ("--custom-rollout-log-function-path", f"{HERE}:async_log", "it must be a plain function, not async"),
        (
            "--eval-function-path",
            f"{HERE}:rollout_without_evaluation",
            "it is called with (args, rollout_id, data_source, evaluation=...), but its signature is "
            "(args, rollout_id, data_source): got an unexpected keyword argument 'evaluation'",
        ),
        ("--data-source-path", f"{HERE}:log", None),
        (
            "--data-source-path",
            f"{HERE}:HalfASource",
            "its method get_samples is called with (num_samples), but its signature is (self): "
            "too many positional arguments",
        ),
    ],
)
def test_one_line_names_flag_path_and_what_is_wrong(flags, flag, path, message):
    (line,) = problems(flags, flag, path)
    assert line.startswith(f"{flag} {path}: ")
    assert message is None or line == f"{flag} {path}: {message}"


def test_what_a_module_raises_on_import_is_said(flags, tmp_path, monkeypatch):
    (tmp_path / "broken_hook.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert problems(flags, "--custom-rm-path", "broken_hook:f") == [
        "--custom-rm-path broken_hook:f: cannot import broken_hook (RuntimeError: no licence)"
    ]


def test_all_wrong_functions_are_said_and_a_shared_one_once(flags):
    lines = problems(flags, "--custom-rm-path", "x", "--custom-generate-function-path", f"{HERE}:reward")
    assert [line.split()[0] for line in lines] == ["--custom-generate-function-path", "--custom-rm-path"]
    assert len(problems(flags, "--rollout-function-path", f"{HERE}:nothing_like_it")) == 1


def test_optional_keywords_go_only_to_functions_that_name_them():
    assert accepted_keywords(sample_hooks.generate, ("evaluation",)) == ("evaluation",)
    assert accepted_keywords(sample_hooks.reward, ("evaluation",)) == ()
