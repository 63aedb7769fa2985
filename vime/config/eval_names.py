"""Names of evaluation data sets: each is part of the name of a file and of several metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vime.files import name_part

__all__ = ["MAX_BYTES", "problems"]

MAX_BYTES = 200
"""Of a name; file systems allow 255 for that of a file, which has a number besides."""

_DETAIL = re.compile(r"-(?:truncated_ratio|response_len|graded|errors|ci95|pass@\d+(?:-ci95)?)")
"""What follows its name in the metrics of a set beside its mean reward; see ``vime.rollout.evaluation``."""

_VERSIONS = ("weight_version/min", "weight_version/max")


def problems(names: Sequence[str]) -> Iterator[str]:
    """What keeps sets of these names, all different, from being told apart, one line each."""
    files: dict[str, str] = {}
    for name in names:
        if not name or len(name.encode(errors="replace")) > MAX_BYTES:
            shown = f"{name[:40]}…" if name else "an empty name"
            yield f"{shown} must have 1 to {MAX_BYTES} bytes: it is part of the name of a file"
        other = files.setdefault(name_part(name), name)
        if other != name:
            yield f"{other!r} and {name!r} would write the same files, eval_{name_part(name)}_…; rename one of them"
        for whose in names:
            if name.startswith(whose) and _DETAIL.fullmatch(name, len(whose)):
                yield f"{name!r} would be the name of a metric of {whose!r} too; rename one of them"
        if name in _VERSIONS:
            yield f"{name!r} would be the name of a metric of all sets too; rename it"
