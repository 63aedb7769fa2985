"""Every flag that exists: ours, those passed through to others, and those not implemented yet."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import Any, Literal

from vime.config.config import OWN_FLAGS
from vime.config.foreign import Program, manifest
from vime.config.foreign.megatron_lm import ALIASES
from vime.config.foreign.owned import why_owned
from vime.config.foreign.sglang import advice
from vime.config.foreign.usual import USUAL
from vime.config.kinds import STR, Kind, Words
from vime.config.unimplemented import UNIMPLEMENTED, refusal
from vime.errors import UserError

Store = Literal["vime", "megatron", "vllm", "router", "config"]

PREFIXES: dict[Program, str] = {"vllm": "vllm-", "router": "router-"}
"""Megatron's flags have no prefix; ours come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a flag sets. Several flags may set the same key: --colocate and --no-colocate."""

    store: Store
    key: str  # within its store
    kind: Kind
    present: Any = True  # for a switch: the value that its presence means

    @property
    def attribute(self) -> str:
        """The name in ``args`` and in the table of origins."""
        return f"{self.store}_{self.key}" if self.store in ("vllm", "router") else self.key


CONFIG_FILE = Target(store="config", key="config", kind=STR)


@functools.cache
def own_targets() -> dict[str, Target]:
    """Our flags by kebab name; a switch also has its negation, unless another flag has that name."""
    targets = {"config": CONFIG_FILE}
    for name, flag in OWN_FLAGS.items():
        kebab = name.replace("_", "-")
        targets[kebab] = Target(store="vime", key=name, kind=flag.kind)
        if flag.kind.words is Words.NONE:
            negation = kebab.removeprefix("no-") if kebab.startswith("no-") else f"no-{kebab}"
            targets.setdefault(negation, Target(store="vime", key=name, kind=flag.kind, present=False))
    return targets


def lookup(name: str) -> Target:
    """The target of a flag, by its kebab name without dashes in front.

    Raises:
        UserError: the flag is unknown (with the nearest name), not implemented yet, or decided by another flag.
    """
    if name in own_targets():
        return own_targets()[name]
    refused = refusal(name)
    if refused is not None:
        raise UserError(refused)
    target = _foreign_target(name)
    if target is not None:
        return target
    instead = advice(name, manifest("vllm"))
    if instead is not None:
        raise UserError(f"--{name} does not exist: the engine is vLLM; {instead}")
    raise UserError(f"unknown flag --{name}{suggestion(name)}")


def _foreign_target(name: str) -> Target | None:
    negative = name.startswith("no-")
    bare = name.removeprefix("no-")
    for program, prefix in PREFIXES.items():
        if bare.startswith(prefix):
            inner = bare.removeprefix(prefix)
            if inner.startswith("no-") and inner not in manifest(program):
                negative, inner = True, inner.removeprefix("no-")
            return _passed_through(program, name, inner, negative)
    if name in ALIASES:
        alias = ALIASES[name]
        return Target(store="megatron", key=alias.key, kind=alias.kind, present=alias.present)
    return _passed_through("megatron", name, bare, negative)


def _passed_through(program: Program, name: str, inner: str, negative: bool) -> Target | None:
    """``inner`` is the program's own name for ``name``, without prefix and negation."""
    if f"no-{inner}" in manifest(program) and negative:
        inner, negative = f"no-{inner}", False
    flag = manifest(program).get(inner)
    if flag is None or (negative and not flag.negatable):
        return None
    reason = why_owned(program, flag.flag, flag.kind)
    if reason is not None:
        raise UserError(f"--{name} cannot be given: {reason}")
    return Target(store=program, key=flag.dest, kind=flag.value_kind, present=not negative)


LIKENESS = 0.75
"""How alike a known name must be."""
OURS = 0.1
"""How much more alike a flag that is passed through must be: users seldom mean one."""


def suggestion(name: str, dashes: str = "--") -> str:
    """ "; did you mean --x?", or --x or --y, or nothing. Usual names elsewhere, also misspelt ones, stand for ours."""
    name = name.lower().replace("_", "-")
    near = {each: difflib.SequenceMatcher(None, each, name).ratio() for each in _near(name)}
    if not near:
        return ""
    ours = {*own_targets(), *UNIMPLEMENTED, *USUAL}
    best = max(near, key=lambda each: near[each] + (OURS if each in ours else 0))
    meant = USUAL.get(best, (best,))
    return f"; did you mean {' or '.join(dashes + each for each in meant)}?"


def _near(name: str) -> list[str]:
    """The nearest names, of ours and of all."""
    ours = [*own_targets(), *UNIMPLEMENTED, *USUAL]
    return [
        near for names in (ours, all_names()) for near in difflib.get_close_matches(name, names, n=1, cutoff=LIKENESS)
    ]


@functools.cache
def all_names() -> tuple[str, ...]:
    """Every name that ``lookup`` knows, ours first."""
    foreign = [f"{prefix}{name}" for program, prefix in PREFIXES.items() for name in manifest(program)]
    return (*own_targets(), *sorted(UNIMPLEMENTED), *ALIASES, *manifest("megatron"), *foreign)
