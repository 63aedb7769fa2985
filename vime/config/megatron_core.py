"""Which Megatron-core Python would import: the installed one, or that of a Megatron-LM on PYTHONPATH.

Nothing is imported to find out. A Megatron-LM whose core has the version that vime is made for may be used; with any
other, patches and weight maps would fit by luck only.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.16.1"
_PART = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?([^'\"\s#]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MegatronCore:
    """The package that ``import megatron.core`` would take."""

    version: str  # "unknown" where its package_info.py does not say
    folder: Path  # that which is on sys.path

    @property
    def problem(self) -> str | None:
        """Why it cannot be used, in one line; None if it can."""
        if self.version == VERSION:
            return None
        return (
            f"megatron.core {self.version} in {self.folder} comes first on Python's path, but {VERSION} is needed: "
            f"check out core_v{VERSION} of Megatron-LM there, or take it out of PYTHONPATH to use the installed package"
        )


def found() -> MegatronCore | None:
    """None where there is no Megatron-core at all."""
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        core = Path(location) / "core"
        if core.is_dir():
            return MegatronCore(_version(core / "package_info.py"), Path(location).parent)
    return None


def _version(info: Path) -> str:
    parts = dict(_PART.findall(info.read_text(encoding="utf-8"))) if info.is_file() else {}
    numbers = [parts.get(name, "") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + parts.get("PRE_RELEASE", "") if all(numbers) else "unknown"
