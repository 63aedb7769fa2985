"""Ray, and only here: placement, actors around plain classes, supervision."""

from __future__ import annotations

import os
from pathlib import Path


def _has_token() -> bool:
    """Whether this user can say who it is to a cluster with token authentication; in the places where Ray looks."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or Path("~/.ray/auth_token").expanduser().is_file()


# Ray 2.60 has token authentication on in clusters and off in what would join one, and looks when it is imported
if "RAY_ADDRESS" in os.environ and _has_token():
    os.environ.setdefault("RAY_AUTH_MODE", "token")
