r"""Where the answer stands in a response: boxes, answer lines, the part after thinking.

One place for all graders, so that they agree on what "the last box" is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOX_OR_BRACE = re.compile(r"\\(?P<box>boxed|fbox)(?![A-Za-z])\s*(?P<open>\{?)|\\.|[{}]", re.DOTALL)
_SPEECH = re.compile(r"[^\W_]")
_ANSWER = re.compile(r"answer\s*[*_]*\s*[:：]\s*[*_]*\s*([^\n]+)", re.IGNORECASE)
_THINK_END = "</think>"
_RESPONSE_MARK = "###Response"


@dataclass(frozen=True, slots=True)
class _Box:
    start: int  # of the macro
    end: int  # behind the box; the end of the text where it is not closed
    content: str | None  # None: not closed


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed`` or ``\fbox``, or None where there is no answer in a box.

    ``\boxed 34`` counts as a box up to the next white space. A last box that was never closed (the response ran into
    its length limit) is no answer; but when nothing is said between the closed box before it and this fragment, then
    the fragment only repeats, and the closed one is the answer.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    last = boxes[-1]
    if last.content is not None:
        return last.content.strip()
    closed = [box for box in boxes if box.content is not None]
    if closed and _only_fragment_follows(text, closed[-1], last):
        return (closed[-1].content or "").strip()
    return None


def answer_line(text: str) -> str | None:
    """What follows the last "Answer:" on its line (or the next), without the emphasis marks around it."""
    found = _ANSWER.findall(text)
    return found[-1].strip().strip("*_").strip() if found else None


def after_thinking(text: str) -> str:
    """The part after the last ``</think>``, else after the last ``###Response``, else the whole text."""
    for mark in (_THINK_END, _RESPONSE_MARK):
        _, found, rest = text.rpartition(mark)
        if found:
            return rest
    return text


def _boxes(text: str) -> list[_Box]:
    """All boxes by where they start, in one pass, so that no nesting makes it slow."""
    boxes: list[_Box] = []
    opened: list[re.Match[str]] = []
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"] and not token["open"]:
            boxes.append(_unbraced(text, token))
        elif token["box"] or token[0] == "{":
            opened.append(token)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start["box"]:
                boxes.append(_Box(start.start(), token.end(), text[start.end() : token.start()]))
    boxes += [_Box(start.start(), len(text), None) for start in opened if start["box"]]
    return sorted(boxes, key=lambda box: box.start)


def _unbraced(text: str, token: re.Match[str]) -> _Box:
    r"""The box of ``\boxed 34``: everything up to white space or the end of the formula."""
    content = re.compile(r"[^\s$]*").match(text, token.end())
    assert content is not None  # the pattern matches the empty text
    answer = content[0].rstrip(".,;:)")
    return _Box(token.start(), content.end(), answer or None)


def _only_fragment_follows(text: str, closed: _Box, fragment: _Box) -> bool:
    between = text[closed.end : fragment.start]
    return not _SPEECH.search(between) and "\n" not in text[fragment.start :].strip()
