"""A Megatron-LM on PYTHONPATH is used if its core is of the version that vime is made for, else refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vime.config.megatron_core import VERSION

ROOT = Path(__file__).resolve().parents[2]
INFO = 'MAJOR = 0\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = "{}"\n'


def test_the_version_is_the_pinned_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"megatron-core=={VERSION}" in project["dependencies"]


def tree(folder: Path, *version: object) -> Path:
    """As a checkout of Megatron-LM: the package has no __init__.py of its own."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('nothing may import this')\n")
    (core / "package_info.py").write_text(INFO.format(*version))
    return folder


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with the folder first on PYTHONPATH."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(("version", "name"), [((15, 0, ""), "0.15.0"), ((16, 1, "rc0"), "0.16.1rc0")])
def test_another_version_is_refused_in_one_line(tmp_path: Path, flags, version, name: str) -> None:
    folder = tree(tmp_path / "Megatron-LM", *version)
    message = (
        f"megatron.core {name} in {folder} comes first on Python's path, but {VERSION} is needed: check out "
        f"core_v{VERSION} of Megatron-LM there, or take it out of PYTHONPATH to use the installed package"
    )
    launched = python(folder, "train.py", *flags())
    assert launched.returncode != 0
    assert launched.stderr.splitlines() == [f"error: {message}"]
    checked = python(folder, "-m", "vime", "doctor")
    assert checked.returncode == 1
    assert f"FAIL  {message}" in checked.stdout.splitlines()


def test_the_right_version_is_used(tmp_path: Path) -> None:
    import importlib.util

    installed = importlib.util.find_spec("megatron")
    assert installed is not None and installed.submodule_search_locations
    folder = tmp_path / "Megatron-LM"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "core").symlink_to(Path(next(iter(installed.submodule_search_locations))) / "core")
    done = python(folder, "-c", "from vime.config.megatron_core import found; print(found().problem, found().folder)")
    assert done.stdout.split() == ["None", str(folder)]
    done = python(folder, "-W", "ignore", "-c", "import megatron.core; print(megatron.core.__file__)")
    assert done.stdout.strip() == str(folder / "megatron" / "core" / "__init__.py")
