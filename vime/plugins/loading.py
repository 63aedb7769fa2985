"""From "package.module:attribute" to a callable whose contract was checked.

Both package.module:function and package.module.function work.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from vime.errors import UserError
from vime.plugins.calling import Raised, guarded, said
from vime.plugins.contract import Contract, Function


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
        with guarded():
            module = importlib.import_module(module_name)
    except Raised as failed:  # the module is the user's: whatever it raises on import is what we report
        error = failed.error
        words = f"{type(error).__name__}: {said(error)}".rstrip(": ")
        raise UserError(f"{flag} {path}: cannot import {module_name} ({words})") from error
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
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it has no signature to look at
        return ()
    return tuple(name for name in names if name in parameters)
