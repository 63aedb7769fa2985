"""How repeated measurements become numbers."""

import pytest

from bench.stats import Comparison, Spread, by_turns


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert Spread((3.0, 1.0, 2.0)).to_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}


def test_a_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        Spread(())


def test_a_ratio_is_taken_pair_by_pair() -> None:
    """The machine was half as fast in the second turn, for both; the sides are still 2 to 1."""
    comparison = Comparison(Spread((200.0, 100.0)), Spread((100.0, 50.0)))
    assert comparison.ratio.values == (2.0, 2.0)


def test_a_comparison_names_its_sides_and_its_unit() -> None:
    found = Comparison(Spread((1.0,)), Spread((4.0,))).to_json(ours="vime", theirs="other", unit="s")
    assert (found["value"], found["unit"], found["vime"]["median"], found["other"]["median"]) == (0.25, "s", 1.0, 4.0)


def test_unequal_sides_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        _ = Comparison(Spread((1.0, 2.0)), Spread((1.0,))).ratio


def test_sides_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def side(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop(0)

    ours, theirs = [9.0, 1.0, 2.0], [9.0, 3.0, 4.0]
    found = by_turns({"a": lambda: side("a", ours), "b": lambda: side("b", theirs)}, turns=2, warm_ups=1)
    assert order == ["a", "b"] * 3
    assert (found["a"].values, found["b"].values) == ((1.0, 2.0), (3.0, 4.0))
