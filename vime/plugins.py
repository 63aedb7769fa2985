"""Custom functions: "package.module:attribute" → callable, with its contract checked before anything starts.

Both package.module:function and package.module.function work. What each function is called with, and whether it is a
coroutine, stands once, in ``CONTRACTS``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.errors import UserError

if TYPE_CHECKING:
    from vime.config import Config

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """How a custom function is called.

    ``optional`` names keyword arguments that are passed only to functions which take them. ``is_async`` is None where
    both a coroutine function and a plain one will do.
    """

    arguments: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_async: bool | None = False
    methods: Mapping[str, tuple[str, ...]] | None = None  # of a class: its methods and their arguments
    returns: str

    def __str__(self) -> str:
        words = [*self.arguments, *(f"{name}=..." for name in self.keywords)]
        return f"({', '.join(words)})"


_ROLLOUT = Contract(
    arguments=("args", "rollout_id", "data_source"),
    keywords=("evaluation",),
    is_async=None,
    returns="groups of samples, or an object with samples and metrics; for an evaluation a dict by data set",
)

CONTRACTS: Mapping[str, Contract] = {
    "custom_rm_path": Contract(
        arguments=("args", "sample"),
        optional=("evaluation",),
        is_async=True,
        returns="a number or a dict; with --group-rm it gets the list of samples and returns a list of those",
    ),
    "custom_generate_function_path": Contract(
        arguments=("args", "sample", "sampling_params"),
        optional=("evaluation",),
        is_async=True,
        returns="the sample, filled",
    ),
    "custom_reward_post_process_path": Contract(
        arguments=("args", "samples"), returns="(raw rewards, rewards), two lists as long as samples"
    ),
    "rollout_function_path": _ROLLOUT,
    "eval_function_path": _ROLLOUT,
    "data_source_path": Contract(
        arguments=("args",),
        methods={
            "get_samples": ("num_samples",),
            "add_samples": ("groups",),
            "save": ("rollout_id",),
            "load": ("rollout_id",),
            "__len__": (),
        },
        returns="an object that prompts come from",
    ),
    "rollout_sample_filter_path": Contract(
        arguments=("args", "groups"), returns="nothing; it sets remove_sample on samples"
    ),
    "custom_rollout_log_function_path": Contract(
        arguments=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        returns="true to replace the default log",
    ),
    "custom_eval_rollout_log_function_path": Contract(
        arguments=("rollout_id", "args", "data", "extra_metrics"), returns="true to replace the default log"
    ),
}
"""By the attribute of the flag in ``config.hooks``."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The custom functions of a run, resolved; None where the user gave none."""

    custom_rm: Function | None = None
    custom_generate_function: Function | None = None
    custom_reward_post_process: Function | None = None
    rollout_function: Function | None = None
    eval_function: Function | None = None
    data_source: type | None = None
    rollout_sample_filter: Function | None = None
    custom_rollout_log_function: Function | None = None
    custom_eval_rollout_log_function: Function | None = None


def resolve_hooks(config: Config) -> Hooks:
    """Imports every custom function of a configuration and checks its contract.

    Raises:
        UserError: one line for each function that cannot be used.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, contract in CONTRACTS.items():
        path, flag = getattr(config.hooks, name), "--" + name.replace("_", "-")
        if path is None or config.origins[name].startswith("derived"):
            continue
        try:
            found[name.removesuffix("_path")] = load_checked(path, flag, contract)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    if "eval_function" not in found and config.hooks.eval_function_path is not None:
        found["eval_function"] = found["rollout_function"]  # what the derived path says
    return Hooks(**found)


def load_checked(path: str, flag: str, contract: Contract) -> Function:
    """The function behind ``path``, known to keep ``contract``.

    Raises:
        UserError: it cannot be found, or it breaks the contract.
    """
    function = load_function(path, flag)
    for problem in contract_problems(function, contract):
        raise UserError(f"{flag} {path}: {problem}")
    return function


def load_function(path: str, flag: str) -> Function:
    """The callable behind ``package.module:attribute`` or ``package.module.attribute``.

    Raises:
        UserError: the module cannot be imported, has no such attribute, or the attribute cannot be called.
    """
    module_name, attribute = split_path(path, flag)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's: whatever it raises on import is what we report
        raise UserError(f"{flag} {path}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    try:
        function = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        names = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{flag} {path}: {module_name} has no {attribute}{hint}") from None
    if not callable(function):
        raise UserError(f"{flag} {path}: {attribute} is a {type(function).__name__}, which cannot be called")
    return function


def split_path(path: str, flag: str) -> tuple[str, str]:
    """Module and attribute. A colon separates them; without one the last dot does."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not attribute:
        raise UserError(f"{flag} {path}: expected package.module:function")
    return module, attribute


def contract_problems(function: Function, contract: Contract) -> Iterator[str]:
    """What keeps ``function`` from being called as the contract says, in words that follow its path."""
    problem = _signature_problem(function, contract.arguments, contract.keywords)
    if problem is not None:
        yield f"it is called with {contract}, but {problem}"
    if contract.methods is not None:
        yield from _class_problems(function, contract.methods)
        return
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if contract.is_async and not is_async:
        yield "it must be an async function (async def)"
    if contract.is_async is False and is_async:
        yield "it must be a plain function, not async"


def _class_problems(cls: Any, methods: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if not inspect.isclass(cls):
        yield "it must be a class"
        return
    for name, arguments in methods.items():
        method = getattr(cls, name, None)
        if not callable(method):
            yield f"the class has no method {name}"
            continue
        problem = _signature_problem(method, ("self", *arguments), ())
        if problem is not None:
            yield f"its method {name} is called with ({', '.join(arguments)}), but {problem}"


def _signature_problem(function: Function, arguments: tuple[str, ...], keywords: tuple[str, ...]) -> str | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it has no signature to check
        return None
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"its signature is {signature}: {error}"
    return None


def accepted_keywords(function: Function, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a contract's optional keyword arguments which the function names itself."""
    return tuple(name for name in names if name in inspect.signature(function).parameters)
