r"""Numbers read exactly, without floating point: integers of any size, decimals, fractions, mixed numbers, per cent.

``1,000``, ``1 000``, ``1{,}000`` and ``1\,000`` are one thousand; other digits with spaces between them are several
numbers, as those in ``10 20`` are. A whole number before a proper fraction is a mixed number: ``2 1/2`` is five halves.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_INTEGER = r"(?:\d{1,3}(?:[ ,]\d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,3}})?"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?P<value>{_DECIMAL})\s*(?P<percent>%?)")
_FRACTION = re.compile(rf"(?P<sign>[+-]?)\s*(?P<above>{_INTEGER})\s*/\s*(?P<below>[+-]?{_INTEGER})")
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*\\frac\s*(?:\{(?P<above>\s*[+-]?\d+\s*)\}|(?P<above1>\d))\s*"
    r"(?:\{(?P<below>\s*[+-]?\d+\s*)\}|(?P<below1>\d))"
)
_WHOLE_AND_FRACTION = re.compile(rf"(?P<sign>[+-]?)\s*(?P<whole>{_INTEGER})(?P<space>\s*)(?P<fraction>\S.*)", re.DOTALL)
# In running text a minus is a sign only where no operand stands before it: "5-3" ends in 3, "= -3" in -3.
_IN_TEXT = re.compile(
    r"(?:(?<![\w.)\]}])[+-])?(?<![\d.,/])\d+ \d+/\d+(?![\d.])"
    r"|(?:(?<![\w.)\]}])[+-])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\w))?(?:/\d+)?"
    r"|(?:(?<![\w.)\]}])[+-])?(?<!\d)\.\d+"
)
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2012\u2013\ufe63\uff0d", "-"))  # minus signs, and dashes written for them
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_BEFORE_FRACTION = re.compile("(?<=[0-9])(?=[¼-¾⅐-⅞])")
_MAX_DIGITS = 4000  # Python refuses to read longer integers; they are compared as text


@dataclass(frozen=True, slots=True)
class ExactNumber:
    """A rational number; ``percent`` tells whether a per-cent sign followed it."""

    value: Fraction
    percent: bool = False

    def same_as(self, other: ExactNumber) -> bool:
        """Exact equality. Where one side alone has a per-cent sign, 50% is both 0.5 and 50."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def parse_number(text: str) -> ExactNumber | None:
    """The number that ``text`` is as a whole, or None."""
    text = text.strip()
    if len(text) > _MAX_DIGITS:
        return None
    if number := _NUMBER.fullmatch(text):
        value = Fraction(_plain(number["value"]))
        return ExactNumber(_signed(number["sign"], value), percent=bool(number["percent"]))
    fraction = _FRACTION.fullmatch(text) or _LATEX_FRACTION.fullmatch(text)
    return _ratio(fraction) if fraction else _mixed(text)


def last_number(text: str) -> ExactNumber | None:
    """The last number in ``text``. ``3/4`` written without spaces is one number, and so is ``2 3/4``; LaTeX fractions
    and exponents are not read. Thousands may be set apart by commas or thin spaces; plain spaces separate numbers."""
    text = re.sub(r"(?<=\d)(?:,\\!|\\,|\\!|\{,\}|[\u00a0\u2009\u202f])(?=\d\d\d)", ",", _SUPERSCRIPTS.sub("", text))
    found = _IN_TEXT.findall(plain(text))
    if not found:
        return None
    return parse_number(found[-1]) or parse_number(found[-1].rpartition(" ")[2])  # "7 3/2" is no mixed number


def plain(text: str) -> str:
    """Characters that mean the same in one form: ``−5`` as ``-5``, ``２`` as ``2``, ``2½`` as ``2 1/2``, ``2¹⁰`` as
    ``2^{10}``."""
    text = _SUPERSCRIPTS.sub(_power, text.translate(_MINUS))
    text = unicodedata.normalize("NFKC", _BEFORE_FRACTION.sub(" ", text))
    return text.translate(_MINUS).replace("\u2044", "/")


def _power(superscripts: re.Match[str]) -> str:
    exponent = unicodedata.normalize("NFKC", superscripts[0]).translate(_MINUS)
    return f"^{exponent}" if len(exponent) == 1 else f"^{{{exponent}}}"


def _mixed(text: str) -> ExactNumber | None:
    """``2 1/2`` or ``2\\frac12``; only a proper fraction can follow a whole number."""
    parts = _WHOLE_AND_FRACTION.fullmatch(text)
    fraction = parts and (_FRACTION.fullmatch(parts["fraction"]) or _LATEX_FRACTION.fullmatch(parts["fraction"]))
    if not parts or not fraction or not (parts["space"] or fraction.re is _LATEX_FRACTION):
        return None
    ratio = None if fraction["sign"] else _ratio(fraction)
    if ratio is None or not 0 <= ratio.value < 1:
        return None
    return ExactNumber(_signed(parts["sign"], int(_plain(parts["whole"])) + ratio.value))


def _ratio(fraction: re.Match[str]) -> ExactNumber | None:
    parts = fraction.groupdict()
    above = int(_plain(parts["above"] or parts["above1"]))
    below = int(_plain(parts["below"] or parts["below1"]))
    return ExactNumber(_signed(parts["sign"], Fraction(above, below))) if below else None


def _plain(digits: str) -> str:
    return digits.replace(",", "").replace(" ", "")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
