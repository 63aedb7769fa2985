"""The JSON protocol between a remote sandbox and its clients; docs/en/advanced/sandbox.md describes it."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

from vime.sandbox.types import Job, Limits, Outcome, Result

_WHOLE = frozenset(each.name for each in dataclasses.fields(Limits) if each.type == "int")
_LIMITS = frozenset(each.name for each in dataclasses.fields(Limits))


def job_to_json(job: Job) -> dict[str, Any]:
    return {
        "files": {path: _content(content) for path, content in job.files.items()},
        "command": job.command,
        "stdin": _content(job.stdin),
        "limits": dataclasses.asdict(job.limits),
    }


def job_from_json(record: Any) -> Job:
    """Raises ValueError, with one line, for whatever is no request."""
    if not isinstance(record, dict) or not isinstance(record.get("files", {}), dict):
        raise ValueError('a request is an object {"files": {...}, "command": [...], "stdin": "", "limits": {...}}')
    command = record.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise ValueError(f'"command" is a list of strings, not {command!r}')
    files = {path: _bytes(content) for path, content in record.get("files", {}).items()}
    return Job.of(files, command, _bytes(record.get("stdin", "")), limits_from_json(record.get("limits", {})))


def limits_from_json(record: Any) -> Limits:
    """Limits of which any may be left out. Raises ValueError for an unknown name or a value that is none."""
    if not isinstance(record, dict) or set(record) - _LIMITS:
        raise ValueError(f"limits are an object with some of {sorted(_LIMITS)}, not {record!r}")
    return Limits(**{name: _limit(name, value) for name, value in record.items()})


def _limit(name: str, value: Any) -> Any:
    """JSON has one kind of numbers: 512.0 is 512."""
    return int(value) if name in _WHOLE and isinstance(value, float) and value.is_integer() else value


def result_to_json(result: Result) -> dict[str, Any]:
    return {**dataclasses.asdict(result), "status": result.status.value}


def result_from_json(record: Any) -> Result:
    """Raises ValueError where the answer is none of ours."""
    try:
        return Result(
            stdout=str(record["stdout"]),
            stderr=str(record["stderr"]),
            status=Outcome(record["status"]),
            exit_code=None if record["exit_code"] is None else int(record["exit_code"]),
            seconds=float(record["seconds"]),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _content(content: bytes) -> str | dict[str, str]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _bytes(content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode("utf-8", errors="surrogatepass")
    if isinstance(content, dict) and set(content) == {"base64"} and isinstance(content["base64"], str):
        try:
            return base64.b64decode(content["base64"], validate=True)
        except ValueError as error:
            raise ValueError(f"a content is no base64: {error}") from None
    raise ValueError('a content is a string or {"base64": "..."}')
