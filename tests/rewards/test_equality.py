"""Which answers are the same mathematics. Pairs are answer | label."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.rewards.equality import clean, compare, same_answer
from vime.rewards.numbers import last_number, parse_number
from vime.rewards.units import quantity
from vime.types import GradeStatus

EQUAL = r"""
2/4 | 1/2
\frac{2}{4} | \frac12
50% | 0.5
50\% | 0.5
1\,000 | 1000
1{,}000 | 1000
1 000 | 1000
1,000 | 1000
2^{10} | 1024
2**10 | 1024
2**3**2 | 512
x\in[1,2] | [1,2]
\binom{5}{2} | 10
\{1,2\} | \{2,1\}
\frac12 | .5
\dfrac{1}{2} | 0.5
1\frac12 | 3/2
34.0 | 34
034 | 34
x=34 | 34
\text{34} | 34
34^\circ | 34
34^{\circ} | 34
34° | 34
\$34 | 34
$34$ | 34
\(34\) | 34
"34." | 34
34. | 34
**34** | 34
34 | \boxed{34}
(1,2) | (1, 2)
2\sqrt3 | \sqrt{12}
(x+1)^2 | x^2+2x+1
-\frac12 | \frac{-1}{2}
−5 | -5
(A) | A
3+4i | 3+4i
xy | yx
3x+2 | 2+3x
\text{East} | east
1e5 | 100000
3\times 10^8 | 300000000
12 cm | 12
\frac{\sqrt3}{2} | 0.866025
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
(-\infty,3) | (-\infty, 3)
9**9**9**9 | 9**9**9**9
2 1/2 | 5/2
-2 1/2 | -5/2
2 \frac{1}{2} | 2.5
x = 2 1/2 | 5/2
2½ | 5/2
½ | 0.5
\frac 1 2 | 1/2
\dbinom 5 2 | 10
1,\!000 | 1000
x = 1\,000 | 1000
1 000 | 1000
3.141\,592 | 3.141592
10 20 | 10  20
１２ | 12
－5 | -5
−½ | -1/2
10⁻³ | 0.001
2⁴ | 16
1.5e3 | 1500
1,5 | (1, 5)
5 cm | 5 centimeters
5\text{ m}^2 | 5 square meters
60 km/h | 60 kilometers per hour
3 m s^{-1} | 3\text{ m/s}
9.8 m s^-2 | 9.8 m/s^2
\log_2 3 | \log_2(3)
\log_{2} 3 | \log_23
12 units | 12 cm
5 | 5 kg
30^\circ\text{C} | 30 °C
x = 5 \text{ cm} | 5 cm
\frac{\sqrt3}{2}\text{ m} | \frac{3}{2\sqrt3} m
5 xy | 5 yx
3t + 2m | 3t + 2m
"""

NOT_EQUAL = r"""
9007199254740993 | 9007199254740992
9007199254740993 | 9007199254740992.0
x=9007199254740993 | 9007199254740992
yearly | ly
listen | silent
(1,2) | [1,2]
(1,2) | (2,1)
0.333 | 1/3
0.3333333333 | \frac13
1000000.0000001 | 1000000
3.14159 | \pi
\sqrt2 | 1.414
34 or 35 | 35
9**9 | 9
2 | -2
x+1 | x+2
A | B
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
1/0 | 0
2 1/2 | 21/2
2 1/2 | 1
3 1/3 | 31/3
x = 2 1/2 | x = 21/2
10 20 | 1020
10 20 | 200
1 2 | 12
1\ 2 | 12
1\,2 | 12
x = 1 2 | x = 12
1 234 5 | 12345
1/2 3 | 1/23
(1 2, 3) | (12, 3)
3 4 | 12
2⁴ | 24
1,5 | 1.5
1,5 | 15
5 cm | 5 m
5\text{ cm} | 5 m
5\text{ cm}^2 | 5\text{ cm}^3
5 hours | 5 minutes
5:00 pm | 5:00 am
60 km/h | 60 mph
5 apples | 5 oranges
2 ft 3 in | 3 ft 2 in
\sqrt2\text{ m} | \sqrt2\text{ cm}
30^\circ\text{C} | 30^\circ\text{F}
6 cm | 5 cm
"""


def pairs(listing):
    return [tuple(part.strip() for part in line.split(" | ")) for line in listing.strip().splitlines()]


@pytest.mark.parametrize(("answer", "label"), pairs(EQUAL))
def test_equal(answer, label):
    assert same_answer(answer, label)


@pytest.mark.parametrize(("answer", "label"), pairs(NOT_EQUAL))
def test_not_equal(answer, label):
    assert not same_answer(answer, label)


PIECES = [
    *(
        "1",
        "23",
        "456",
        ".",
        ",",
        "/",
        " ",
        "-",
        "−",
        "+",
        "%",
        "½",
        "²",
        "⁻",
        "１",
        "\u2009",
        r"\,",
        r"\!",
        r"\ ",
        "~",
        "{,}",
    ),
    *(r"\frac", r"\text{", "{", "}", "^", r"\circ", "°", "cm", "m", "per", "square", "units", "x", "=", "$", "e9"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join))
def test_no_text_makes_the_readers_fail_and_every_answer_is_itself(text):
    for read in (parse_number, last_number, quantity):
        read(text)
        read(clean(text))
    assert same_answer(text, text) or not clean(text)


def test_long_answers_are_read_in_time():
    begin = time.process_time()
    for piece in ("^2", "1 ", "1 234 ", "m/", r"\text{m}", "½", "x^{2} ", "1.234\\,", "square "):
        assert not same_answer("5" + piece * 2000, "5 cm")
        last_number(piece * 2000)
    assert time.process_time() - begin < 10


def test_integers_of_five_thousand_digits_are_compared_as_text():
    assert same_answer("7" * 5000, "7" * 5000)
    assert not same_answer("7" * 5000, "7" * 4999 + "8")


@pytest.mark.parametrize("label", [None, "", "  "])
def test_without_a_label_there_is_no_score(label):
    assert compare("34", label).status is GradeStatus.ERROR


def test_an_empty_answer_is_invalid_and_counts_as_zero():
    grade = compare(" ", "34")
    assert (grade.score, grade.status) == (0.0, GradeStatus.INVALID)


def test_the_detail_is_one_short_line():
    detail = compare("a\nb" * 500, "34").detail
    assert "\n" not in detail
    assert len(detail) == 200
