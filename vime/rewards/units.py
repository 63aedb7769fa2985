r"""What an answer counts in: the words behind its number.

``12 cm`` and ``12`` may be the same answer, because many labels leave the unit out. ``12 cm`` and ``12 m`` are not,
and math-verify takes both for 12. So units are compared here, by name: nothing is converted, 100 cm is not 1 m.
"""

from __future__ import annotations

import re

_TOKENS = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s*\{(?P<wrapped>[^{}\\]*)\}|\^\s*(?:\{[^{}]*\}|[+-]?\d)|\\[A-Za-z]+|[A-Za-z]+|(?s:.)"
)
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_TEMPERATURE = re.compile(r"°\s*([CFK])(?![A-Za-z])")
_PARTS = re.compile(r"[A-Za-zµμ]+|°|/|\^\s*\{?\s*[+-]?\d+\s*\}?")
_BETWEEN = frozenset({"/", " ", "*", r"\cdot", "."})
_ASSIGNED = re.compile(r"^\s*[A-Za-z]\s*=")
_FUNCTIONS = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "max", "min", "gcd", "lcm", "mod"])

_NAMES = {
    name: unit
    for unit, names in {
        "m": "m meter metre mtr",
        "cm": "cm centimeter centimetre",
        "mm": "mm millimeter millimetre",
        "dm": "dm decimeter decimetre",
        "km": "km kilometer kilometre",
        "in": "in inch inche",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "g": "g gm gram gramme",
        "kg": "kg kilogram kilo",
        "mg": "mg milligram",
        "t": "t ton tonne",
        "lb": "lb lbs pound",
        "oz": "oz ounce",
        "s": "s sec second",
        "ms": "ms millisecond",
        "min": "min minute",
        "h": "h hr hrs hour",
        "d": "d day",
        "wk": "wk week",
        "yr": "yr year",
        "L": "L l lt liter litre",
        "mL": "mL ml milliliter millilitre",
        "c": "c cent",
        "rs": "rs Rs rupee",
        "am": "am AM",
        "pm": "pm PM",
        "N": "newton",
        "J": "joule",
        "W": "watt",
        "rad": "rad radian",
        "°": "° deg degree",
    }.items()
    for name in names.split()
}
_PHRASES = {"mph": "mi / h", "kmph": "km / h", "kmh": "km / h", "kph": "km / h", "cc": "cm ^3", "per": "/"}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3"}


def quantity(text: str) -> tuple[str, str] | None:
    """(what stands before the unit, the unit under its one name), or None where no unit is named."""
    tokens = list(_TOKENS.finditer(_TEMPERATURE.sub(r"\\text{°\1}", _DEGREE.sub("°", text))))
    start = len(tokens)
    while start > 0 and _goes_on(tokens, start - 1):
        start -= 1
    tail = "".join(f" {token['wrapped']} " if token["wrapped"] is not None else token[0] for token in tokens[start:])
    value = "".join(token[0] for token in tokens[:start]).strip()
    unit = _canonical(tail)
    return (value, unit) if unit and _counts(value) else None


def names_more(value: str) -> bool:
    """Whether there are further names in what stands before a unit, as in 2 ft 3."""
    return re.search(r"(?<![\\A-Za-z])[A-Za-z]", _ASSIGNED.sub("", value)) is not None


def _counts(value: str) -> bool:
    """Whether a unit can follow: not where the last of these letters may all be variables, as in 3t + 2m."""
    ends = re.search(r"[0-9)}\]°]$|\\[A-Za-z]+$", value)
    return ends is not None and not (names_more(value) and re.search(r"[-+*^=()]", _ASSIGNED.sub("", value)))


def _goes_on(tokens: list[re.Match[str]], place: int) -> bool:
    """Whether this token belongs to the unit that the tokens behind it end."""
    token = tokens[place]
    if token["wrapped"] is not None:
        return re.fullmatch(r"[A-Za-z0-9µμ°/^.\- ]*", token["wrapped"]) is not None
    if token[0].startswith("^"):
        before = tokens[place - 1][0] if place > 0 else "^"
        return before not in _BETWEEN and not before.startswith("^") and _goes_on(tokens, place - 1)
    is_apart = place > 0 and tokens[place - 1][0].isspace()
    return token[0].isspace() or token[0] in _BETWEEN or token[0] == "°" or _is_unit(token[0], is_apart)


def _is_unit(word: str, is_apart: bool) -> bool:
    """A name that is known; or any longer word, unless it is glued to a number, as a product of variables is."""
    known = {word, word.lower()} if len(word) > 2 else {word}
    if known & (_NAMES.keys() | _PHRASES.keys() | _POWERS.keys()):
        return True
    return is_apart and word.isalpha() and len(word) > 2 and word.lower() not in _FUNCTIONS


def _canonical(tail: str) -> str:
    """The unit with one name for each of its parts; empty for bare "units"."""
    found: list[str] = []
    before = ""  # a power that stands before its unit: square metres
    for part in _PARTS.findall(tail):
        part = "^" + part.strip("^{} \t") if part.startswith("^") else part
        power = _POWERS.get(part.lower())
        if part.startswith("^-") and found:  # m s^-1 is m/s
            found[-1:] = ["/", found[-1], *filter(None, [part.replace("-", "").removesuffix("^1")])]
        elif power and part.lower() in ("squared", "cubed"):
            found.append(power)
        elif power:
            before = power
        else:
            found += [_name(part), *filter(None, [before])]
            before = ""
    unit = " ".join([*found, *filter(None, [before])])
    return "" if not re.search(r"[A-Za-z°]", unit.replace("unit", "")) else unit


def _name(part: str) -> str:
    lower = part.lower()
    singular = lower[:-1] if len(lower) > 3 and lower.endswith("s") else lower
    if singular in _PHRASES:
        return _PHRASES[singular]
    return _NAMES.get(part) or _NAMES.get(singular) or singular
