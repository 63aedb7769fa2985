"""Custom functions: "package.module:attribute" → callable, with its contract checked before anything starts.

Each extension point is one ``Contract``: what the function is called with, where and when, what it returns, and a trial
on synthetic values. ``vime check-plugin`` and the tests under tests/plugin_contracts run the trials; the guide in
docs/en/get_started/customization.md is written from the contracts. A new one is an entry in the module of its topic.
"""

from vime.plugins.catalog import CONTRACTS, Hooks, resolve_hooks
from vime.plugins.contract import Contract, WrongAnswer
from vime.plugins.hook import Hook, HookError
from vime.plugins.loading import accepted_keywords, contract_problems, load_checked, load_function

__all__ = [
    "CONTRACTS",
    "Contract",
    "Hook",
    "HookError",
    "Hooks",
    "WrongAnswer",
    "accepted_keywords",
    "contract_problems",
    "load_checked",
    "load_function",
    "resolve_hooks",
]
