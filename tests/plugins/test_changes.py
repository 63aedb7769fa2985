"""Finding what a function changed."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from vime.plugins.changes import changes
from vime.types import Sample


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda s: setattr(s[1], "response", "x"), "samples[1].response"),
        (lambda s: s[0].tokens.append(3), "samples[0].tokens"),
        (lambda s: s[0].metadata.update(a=1), "samples[0].metadata['a']"),
        (lambda s: s.pop(), "samples"),
        (lambda s: s[0].metadata["scores"].add_(1), "samples[0].metadata['scores']"),
    ],
)
def test_a_change_is_found_and_named(change, name):
    samples = [Sample(index=i, tokens=[1, 2], metadata={"scores": torch.zeros(2)}) for i in range(2)]
    before = copy.deepcopy(samples)
    change(samples)
    assert list(changes({"samples": before}, {"samples": samples})) == [name]


def test_nothing_changed_is_nothing_found_and_nan_equals_itself():
    value = {"samples": [Sample(reward=math.nan)], "tensor": torch.tensor([math.nan, 1.0])}
    assert not list(changes(copy.deepcopy(value), value))
