"""What functions of the trainer leave in rollout_data, as it is read again."""

from __future__ import annotations

import math

import pytest
import torch

from vime.plugins.contract import WrongAnswer
from vime.plugins.tensors import token_rows

GIVEN = [torch.tensor([0.5, math.nan]), torch.tensor([-math.inf])]


def test_values_that_were_not_finite_before_are_not_held_against_the_function() -> None:
    found = token_rows({"advantages": [row.clone() for row in GIVEN]}, "advantages", [2, 1], before=GIVEN)
    assert torch.equal(found[1], GIVEN[1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_it_made_are(value: float) -> None:
    data = {"advantages": [GIVEN[0], torch.tensor([value])]}
    with pytest.raises(WrongAnswer, match=r"^set advantages\[1\] to values that are not finite$"):
        token_rows(data, "advantages", [2, 1], before=GIVEN)


def test_where_samples_may_be_left_out_their_values_may_be_anything() -> None:
    assert token_rows({"advantages": GIVEN}, "advantages", [2, 1], finite=False)[0][1].isnan()
