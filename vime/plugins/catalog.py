"""All contracts, and the functions that a configuration names for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vime.errors import UserError
from vime.plugins import losses, rollout, training
from vime.plugins.contract import Contract, Side
from vime.plugins.hook import Hook
from vime.plugins.loading import load_checked

if TYPE_CHECKING:
    from vime.config import Config

CONTRACTS: Mapping[str, Contract] = {
    each.name: each for each in (*rollout.CONTRACTS, *training.CONTRACTS, *losses.CONTRACTS)
}
"""By the attribute of the flag in ``args``, in the order in which a rollout meets them."""


def log_file(config: Config) -> Path:
    """Where tracebacks of custom functions go."""
    return Path(config.ops.run_dir) / "logs" / "custom_functions.log"


class Hooks:
    """The custom functions of a run, ready to be called."""

    def __init__(self, found: Mapping[str, tuple[Hook, ...]]) -> None:
        self._found = dict(found)

    def get(self, contract: Contract) -> Hook | None:
        """The function for a contract that takes one; None where the user gave none."""
        return next(iter(self.all(contract)), None)

    def all(self, contract: Contract) -> tuple[Hook, ...]:
        """The functions for a contract that takes several, in the order given."""
        return self._found.get(contract.name, ())


def resolve_hooks(config: Config, side: Side | None = None) -> Hooks:
    """Imports the custom functions of a configuration and checks their contracts.

    Args:
        side: only those that run there; None: all.

    Raises:
        UserError: one line for each function that cannot be used.
    """
    found: dict[str, tuple[Hook, ...]] = {}
    problems: list[str] = []
    for name, contract in CONTRACTS.items():
        if side not in (None, contract.side) or config.origins.get(name, "").startswith("derived"):
            continue
        hooks = []
        for path in paths_of(getattr(config.hooks, name, None)):
            try:
                hooks.append(load_hook(path, contract.flag, contract, log=log_file(config)))
            except UserError as error:
                problems.append(str(error))
        found[name] = tuple(hooks)
    if problems:
        raise UserError("\n".join(problems))
    if config.hooks.eval_function_path is not None and rollout.EVAL_FUNCTION.name not in found:
        found[rollout.EVAL_FUNCTION.name] = found.get(rollout.ROLLOUT_FUNCTION.name, ())  # what the derived path says
    return Hooks(found)


def load_hook(path: str, flag: str, contract: Contract, log: Path | None = None) -> Hook:
    """The function behind ``path``, ready to be called.

    Raises:
        UserError: it cannot be found, or it breaks the contract.
    """
    return Hook(load_checked(path, flag, contract), flag, path, log)


def paths_of(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """What a flag names: nothing, one function or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value
