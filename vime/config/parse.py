"""argv → Config."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.config.config import OWN_FLAGS, Config, FrozenMap
from vime.config.custom import custom_values
from vime.config.derive import derive
from vime.config.reading import Draft, read
from vime.config.reference import help_text
from vime.config.role_file import read_roles
from vime.config.rules import RULES, WARNINGS, Rule, Violation
from vime.config.sections import SECTIONS
from vime.errors import UserError

USAGE = """\
usage: python {program} FLAGS

Trains a language model: vLLM answers the prompts of --prompt-data, the answers get rewards, and Megatron-core trains on
them. `vime explain FLAGS` tells every value and every mistake and starts nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A configuration together with all that is wrong and doubtful about it."""

    config: Config  # where something is wrong, its value may be None or the default
    violations: tuple[str, ...]
    warnings: tuple[str, ...]
    lacking: frozenset[str] = frozenset()  # those violations that only say what a run needs besides


def resolve(argv: Sequence[str]) -> Resolution:
    """Reads, derives and checks. Never raises for what a user wrote."""
    draft = read(argv)
    critic_overrides = read_roles(draft)
    values: dict[str, Any] = {name: flag.default for name, flag in OWN_FLAGS.items()} | draft.of("vime")
    warnings = derive(values, draft.origins)
    custom = _custom(values["custom_config_path"], draft.errors)
    config = _build(values, draft, custom, critic_overrides)
    found = _unbroken(RULES, config, draft)
    return Resolution(
        config=config,
        violations=(*draft.errors, *_messages(found)),
        warnings=(*warnings, *_messages(_unbroken(WARNINGS, config, draft))),
        lacking=frozenset(each.message for each in found if each.lacking),
    )


def parse_config(argv: Sequence[str]) -> Config:
    """The configuration of a command line.

    Raises:
        UserError: something is wrong; one line for each mistake.
    """
    resolution = resolve(argv)
    if resolution.violations:
        raise UserError("\n".join(resolution.violations))
    return resolution.config


def parse_or_exit(argv: Sequence[str]) -> Config:
    """For programs: prints mistakes to stderr, one a line, and exits with 1; where there are none, what is doubtful.

    Custom functions are imported and checked too, before anything starts.
    """
    program = Path(sys.argv[0]).name
    if "-h" in argv or "--help" in argv:
        print(USAGE.format(program=program), help_text(), sep="\n")
        raise SystemExit(0)
    resolution = with_hooks_checked(resolve(argv))
    for line in told(resolution):
        print(line, file=sys.stderr)
    if resolution.violations:
        if lacks_required(resolution.config):
            print(f"python {program} --help lists every flag", file=sys.stderr)
        raise SystemExit(1)
    return resolution.config


def told(resolution: Resolution) -> list[str]:
    """The mistakes; where there are none, the doubts, which say nothing of a configuration that will change."""
    if resolution.violations:
        return [f"error: {violation}" for violation in resolution.violations]
    return [f"warning: {warning}" for warning in resolution.warnings]


def lacks_required(config: Config) -> bool:
    """Whether flags are missing that every run needs."""
    return any(flag.required and config.flat()[name] is None for name, flag in OWN_FLAGS.items())


def with_hooks_checked(resolution: Resolution) -> Resolution:
    """The same, with what is wrong about its custom functions; they are imported for this."""
    from vime.plugins import resolve_hooks

    try:
        resolve_hooks(resolution.config)
    except UserError as error:
        return replace(resolution, violations=(*resolution.violations, *str(error).splitlines()))
    return resolution


def _build(values: dict[str, Any], draft: Draft, custom: dict[str, Any], critic_overrides: Mapping[str, Any]) -> Config:
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, flag in OWN_FLAGS.items():
        parts[flag.section][name] = values[name]
    origins = dict.fromkeys(OWN_FLAGS, "default") | draft.origins
    return Config(
        **{section: SECTIONS[section](**part) for section, part in parts.items()},
        megatron=FrozenMap(draft.of("megatron")),
        vllm=FrozenMap(draft.of("vllm")),
        router=FrozenMap(draft.of("router")),
        custom=FrozenMap(custom),
        critic_overrides=FrozenMap(critic_overrides),
        origins=FrozenMap(origins),
    )


def _custom(path: str | None, errors: list[str]) -> dict[str, Any]:
    try:
        return custom_values(path)
    except UserError as error:
        errors += str(error).splitlines()
        return {}


def _unbroken(rules: Iterable[Rule], config: Config, draft: Draft) -> list[Violation]:
    return [each for each in violations_of(rules, config) if not draft.broken & set(each.about)]


def _messages(found: Iterable[Violation]) -> list[str]:
    return list(dict.fromkeys(each.message for each in found))


def violations_of(rules: Iterable[Rule], config: Config) -> Iterator[Violation]:
    """What the rules say, and what the system says of paths that it will not even look for: names that are too long,
    places that this user may not see."""
    for rule in rules:
        try:
            yield from rule(config)
        except OSError as error:
            yield Violation(f"{error.filename}: {error.strerror}")
