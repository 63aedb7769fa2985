"""The proof of arrival compares what the model computes with, as the hardware reads it."""

import torch

from vime.serving.proof import without_subnormals


def test_numbers_that_bfloat16_products_read_as_zero_compare_as_zero():
    tiny = torch.finfo(torch.bfloat16).tiny
    values = torch.tensor([0.0, 1e-40, -1e-40, tiny, -tiny, 2e-5], dtype=torch.bfloat16)
    assert without_subnormals(values).tolist() == [0, 0, 0, values[3], values[4], values[5]]


def test_what_is_not_finite_stays_so():
    values = without_subnormals(torch.tensor([float("nan"), float("inf")]))
    assert values.isnan()[0] and values.isinf()[1]
