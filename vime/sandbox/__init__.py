"""Runs untrusted code for rewards and tools, here in a subprocess or on a remote service.

What it protects against, and what it does not: docs/en/advanced/sandbox.md.
"""

from vime.sandbox.local import Isolation, LocalSandbox
from vime.sandbox.remote import TOKEN_VARIABLE, RemoteSandbox
from vime.sandbox.types import Files, Limits, Outcome, Result, Sandbox, SandboxError

__all__ = [
    "TOKEN_VARIABLE",
    "Files",
    "Isolation",
    "Limits",
    "LocalSandbox",
    "Outcome",
    "RemoteSandbox",
    "Result",
    "Sandbox",
    "SandboxError",
]
