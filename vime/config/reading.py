"""From words and YAML files to raw values, with every mistake collected instead of stopping at the first."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.config.catalog import CONFIG_FILE, Store, Target, lookup, suggestion
from vime.config.kinds import Words
from vime.errors import UserError

COMMAND_LINE = "command line"
LONGEST_SHOWN = 200  # characters of a value that is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One flag as the user wrote it."""

    target: Target
    raw: Any
    written: str  # how messages call it: --lr, or run.yaml:3: lr
    origin: str


@dataclass(slots=True)
class Draft:
    """What was given, converted; and what was wrong about it."""

    values: dict[tuple[Store, str], Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # attributes whose value could not be read

    def of(self, store: Store) -> dict[str, Any]:
        """The values that belong to one store, by key."""
        return {key: value for (owner, key), value in self.values.items() if owner == store}


def read(argv: Sequence[str]) -> Draft:
    """Reads ``--config`` files and then the command line, which wins."""
    draft = Draft()
    given = list(command_line(argv, draft.errors))
    for path in [each.raw for each in given if each.target is CONFIG_FILE]:
        apply(draft, yaml_flags(path, draft.errors))
    apply(draft, [each for each in given if each.target is not CONFIG_FILE])
    return draft


def command_line(argv: Sequence[str], errors: list[str]) -> Iterator[Given]:
    """Splits words into flags: ``--flag value``, ``--flag=value``, ``--flag a b c``, ``--switch``."""
    position = 0
    while position < len(argv):
        word = argv[position]
        if not is_flag(word):
            errors.append(f"unexpected {word!r}: no flag before it takes it")
            position += 1
            continue
        end = position + 1
        while end < len(argv) and not is_flag(argv[end]):
            end += 1
        name, equals, value = word[2:].partition("=")
        words = ([value] if equals else []) + list(argv[position + 1 : end])
        position = end
        try:
            yield _one_flag(name, words)
        except UserError as error:
            errors.append(str(error))


def is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _one_flag(name: str, words: list[str]) -> Given:
    target = lookup(name)
    raw: Any = words
    if target.kind.words is Words.NONE:
        raw = words.pop(0) if words and words[0].lower() in ("true", "false") else True
    elif target.kind.words is Words.ONE:
        if not words:
            raise UserError(f"--{name} expects {target.kind.expected}, but nothing follows it")
        raw = words.pop(0)
    elif not words:
        raise UserError(f"--{name} expects {target.kind.expected}, but nothing follows it")
    if target.kind.words is not Words.MANY and words:
        count = "no value" if target.kind.words is Words.NONE else "one value"
        raise UserError(f"unexpected {words[0]!r}: --{name} takes {count}")
    return Given(target=target, raw=raw, written=f"--{name}", origin=COMMAND_LINE)


def yaml_flags(path: str, errors: list[str]) -> Iterator[Given]:
    """The flags of a YAML file: a flat mapping of names (kebab case or underscores) to values."""
    try:
        entries = list(yaml_entries(path))
    except UserError as error:
        errors.append(str(error))
        return
    for key, raw, line in entries:
        name = key.replace("_", "-")
        where = f"{path}:{line}"
        try:
            target = lookup(name)
        except UserError as error:
            known = str(error) if "unknown" not in str(error) else f"unknown key {key!r}{suggestion(name, dashes='')}"
            errors.append(f"{where}: {known}")
            continue
        yield Given(target=target, raw=raw, written=f"{where}: {key}", origin=where)


def yaml_entries(path: str) -> Iterator[tuple[str, Any, int]]:
    """Key, value and line (from 1) of each entry of a YAML mapping.

    Raises:
        UserError: the file cannot be read, is no YAML, is no mapping, or names a key twice.
    """
    import yaml

    with _told(path):
        loader = yaml.SafeLoader(_yaml_text(path))
        node = loader.get_single_node()
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: expected names and values")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key.replace("_", "-") in seen:
            raise UserError(f"{path}:{line}: {key} stands there twice")
        seen.add(key.replace("_", "-"))
        with _told(f"{path}:{line}: {key}"):
            value = loader.construct_object(value_node, deep=True)
        yield key, value, line


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """What a file can do to its reader becomes one line."""
    import yaml

    try:
        yield
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{where}: not readable as YAML: too many levels within each other") from None
    except ValueError as error:  # a whole number of thousands of digits, the 32nd of a month
        raise UserError(f"{where}: not readable as YAML: {str(error).partition(';')[0]}") from None


def _yaml_text(path: str) -> str | bytes:
    """The text; YAML may be UTF-16 too, which its reader knows by the first two bytes."""
    content = Path(path).read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise UserError(f"{path}:{line}: not UTF-8 at byte {byte}") from None


def apply(draft: Draft, source: Iterator[Given] | list[Given]) -> None:
    """Converts one source's flags over what earlier sources gave."""
    fresh: dict[str, Any] = {}
    for each in source:
        attribute = each.target.attribute
        try:
            value = _converted(each)
        except (ValueError, TypeError, RecursionError):
            draft.errors.append(_refusal(each))
            draft.broken.add(attribute)
            continue
        if each.target.kind.appends and attribute in fresh:
            value = fresh[attribute] + value
        fresh[attribute] = value
        draft.values[each.target.store, each.target.key] = value
        draft.origins[attribute] = each.origin


def _refusal(given: Given) -> str:
    kind = given.target.kind
    why = kind.instead.get(given.raw) if isinstance(given.raw, str) else None
    if why is not None:
        return f"{given.written} {given.raw} cannot be given: {why}"
    return f"{given.written} expects {kind.expected}, not {_short(given.raw)}"


def _converted(given: Given) -> Any:
    kind = given.target.kind
    if given.raw is None:
        if not kind.optional:
            raise ValueError(given.raw)
        return None
    value = kind.convert(given.raw)
    if kind.words is Words.NONE:
        return given.target.present if value else not given.target.present
    return value


def _short(raw: Any) -> str:
    written = repr(" ".join(map(str, raw)) if isinstance(raw, list) else raw)
    return written if len(written) <= LONGEST_SHOWN else f"{written[:LONGEST_SHOWN]}…"
