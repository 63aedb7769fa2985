#!/usr/bin/env python
"""Writes the manifests of foreign flags: vime/config/foreign/{megatron,vllm,router}.json.

Run it after an upgrade of megatron-core, vLLM or vllm-router and read the diff. It is the only program that imports
them for their flags; vime itself reads the manifests, because importing vLLM takes seconds and may need a GPU.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

FOREIGN = Path(__file__).resolve().parent.parent / "vime" / "config" / "foreign"

Entry = dict[str, Any]


def entry(**values: Any) -> Entry:
    """A manifest entry without what is false or empty; ``vime/config/foreign`` knows the defaults."""
    return {key: value for key, value in values.items() if value not in (None, False, "", [], ())}


def first_sentence(text: str | None) -> str:
    flat = " ".join((text or "").split())
    match = re.match(r"(.+?[.!?])(\s|$)", flat)
    return (match[1] if match else flat)[:200].rstrip()


def short_default(value: Any) -> str:
    text = "" if value is dataclasses.MISSING else repr(value)
    return text if len(text) <= 60 and " at 0x" not in text else ""


# --- argparse programs: vLLM and the router -----------------------------------------------------------------------


def vllm_entries() -> list[Entry]:
    """Flags of vLLM's API server."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.argv = [sys.argv[0], "--help"]  # vLLM leaves help texts out unless it sees this while it is imported
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return list(parser_entries(make_arg_parser(FlexibleArgumentParser(add_help=False))))


def router_entries() -> list[Entry]:
    """Flags of vllm-router."""
    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser)
    return list(parser_entries(parser))


def parser_entries(parser: argparse.ArgumentParser) -> Iterator[Entry]:
    for action in parser._actions:
        names = [each[2:] for each in action.option_strings if each.startswith("--")]
        if not names:
            continue
        positive = [name for name in names if not name.startswith("no-")] or names
        switch = action.nargs == 0
        yield entry(
            flag=positive[0],
            aliases=positive[1:],
            dest=action.dest,
            kind="switch" if switch else argparse_kind(action),
            list=not switch and action.nargs is not None and action.nargs != "?",
            append=isinstance(action, argparse._AppendAction),
            negatable=isinstance(action, argparse.BooleanOptionalAction),
            choices=sorted(map(str, action.choices)) if action.choices else None,
            default=short_default(action.default),
            help=first_sentence(action.help),
        )


def argparse_kind(action: argparse.Action) -> str:
    """Finds out what a converter takes by giving it words; vLLM's converters are closures without a name."""
    convert = action.type
    if convert is None:
        return "str"
    if "JSON string" in (action.help or "") or converted(convert, '{"a": 1}') == {"a": 1}:
        return "json" if converted(convert, "x") is None else "json_or_str"
    if converted(convert, "4k") in (4000, 4096):
        return "human_int"
    for kind, word, value in (("float", "0.5", 0.5), ("int", "7", 7)):
        result = converted(convert, word)
        if result == value and not isinstance(result, str):
            return kind
    return "str"


def converted(convert: Callable[[str], Any], word: str) -> Any:
    try:
        return convert(word)
    except Exception:  # a refusal may be of any kind
        return None


# --- dataclasses: Megatron-core -----------------------------------------------------------------------------------


def megatron_entries() -> list[Entry]:
    """Fields of Megatron-core's configuration classes. A name that several have means the same in each."""
    from megatron.core import ModelParallelConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    found: dict[str, Entry] = {}
    for cls in (TransformerConfig, ModelParallelConfig, OptimizerConfig, DistributedDataParallelConfig):
        docs = field_docs(cls)
        for field in dataclasses.fields(cls):
            if not field.name.startswith("_") and field.name not in found:
                found[field.name] = field_entry(field, cls, docs.get(field.name, ""))
    return list(found.values())


def field_entry(field: dataclasses.Field[Any], cls: type, doc: str) -> Entry:
    hint = typing.get_type_hints(cls)[field.name]
    kind, is_list, choices = annotation_kind(hint)
    return entry(
        flag=field.name.lower().replace("_", "-"),
        dest=field.name,
        kind=kind,
        list=is_list,
        negatable=kind == "switch",
        choices=choices,
        default=short_default(field.default),
        help=first_sentence(doc),
    )


def annotation_kind(hint: Any) -> tuple[str, bool, list[str] | None]:
    """Kind, whether it is a list, choices."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        return annotation_kind(inner[0]) if len(inner) == 1 else ("json_or_str", False, None)
    if typing.get_origin(hint) is Literal:
        return "str", False, list(typing.get_args(hint))
    if typing.get_origin(hint) in (list, tuple):
        return annotation_kind(typing.get_args(hint)[0])[0], True, None
    simple = {bool: "switch", int: "int", float: "float", str: "str"}
    return simple.get(hint, "object"), False, None


def field_docs(cls: type) -> dict[str, str]:
    """The text under each field, which Python does not keep: read from the source of the class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            named = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = str(following.value.value)  # type: ignore[union-attr]
    return docs


MAKERS = {"megatron": megatron_entries, "vllm": vllm_entries, "router": router_entries}


def render(entries: list[Entry]) -> str:
    """JSON with one flag a line, so that an upgrade reads well as a diff."""
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in entries)
    return f"[\n{lines}\n]\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which manifests to write: megatron, vllm, router; all without a name")
    names = parser.parse_args().names or list(MAKERS)
    for name in names:
        entries = MAKERS[name]()
        (FOREIGN / f"{name}.json").write_text(render(entries), encoding="utf-8")
        print(f"{name}.json: {len(entries)} flags")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
