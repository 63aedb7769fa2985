"""Attention inside packed segments against torch's attention on each segment alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vime.training.layers import attention
from vime.training.layers.attention import attend
from vime.training.layers.context import ContextPart
from vime.training.layers.segments import Segments, group_segments

HEADS, GROUPS, WIDTH = 6, 2, 8
CPU = torch.device("cpu")


def make_inputs(tokens: int) -> list[torch.Tensor]:
    """Query, key and value; the value is a view with gaps, as Megatron's split of the projection gives it."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, HEADS, WIDTH, generator=generator)
    both = torch.randn(tokens, GROUPS, 2 * WIDTH, generator=generator)
    return [x.requires_grad_() for x in (query, both[..., :WIDTH].clone(), both[..., WIDTH:].detach())]


def each_alone(inputs: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    heads_first = ([x.transpose(0, 1)[None] for x in part] for part in parts)
    outputs = [F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True) for qkv in heads_first]
    return torch.cat([out[0].transpose(0, 1) for out in outputs])


@pytest.mark.parametrize("direct_length", [0, 1000], ids=["kernel", "products"])
@pytest.mark.parametrize("lengths", [(5, 5, 5), (7,), (1, 9, 3, 8, 30, 2, 9)], ids=str)
def test_values_and_gradients_are_those_of_each_segment_alone(
    lengths: tuple[int, ...], direct_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "DIRECT_LENGTH", direct_length)
    inputs = make_inputs(sum(lengths))
    out = attend(*inputs, Segments.of(tuple((n,) for n in lengths), CPU))
    expected = each_alone(inputs, lengths)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(out)
    for found, wanted in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_segments_of_one_length_are_taken_as_they_lie() -> None:
    (group,) = group_segments(((4,), (4,), (4,)), CPU)
    assert group.whole
    assert group.queries.length == 4


def test_a_group_has_at_most_a_quarter_of_padding() -> None:
    lengths = (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
    groups = group_segments(tuple((n,) for n in lengths), CPU)
    for group in groups:
        assert len(group.queries.tokens) >= 0.75 * len(group.queries.index)
    together = torch.cat([group.queries.tokens for group in groups])
    assert together.sort().values.tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize("direct_length", [0, 1000], ids=["kernel", "products"])
def test_branches_see_their_stem_and_themselves(direct_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees and a plain segment; each branch is computed as if it followed its stem directly."""
    monkeypatch.setattr(attention, "DIRECT_LENGTH", direct_length)
    trees = ((3, 2, 0, 4), (5,), (4, 1, 3))
    inputs = make_inputs(sum(map(sum, trees)))
    out = attend(*inputs, Segments.of(trees, CPU))
    start = 0
    for tree in trees:
        stem = list(range(start, start + tree[0]))
        start += tree[0]
        for length in tree[1:] or (0,):
            rows = [*stem, *range(start, start + length)]
            expected = each_alone([x[rows] for x in inputs], (len(rows),))
            torch.testing.assert_close(out[rows], expected, rtol=1e-5, atol=1e-5)
            start += length


@pytest.mark.parametrize("direct_length", [0, 1000], ids=["kernel", "products"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_parts_of_context_parallel_ranks_make_the_whole(
    ranks: int, direct_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank attends from its own tokens to the keys of all; values are wider than keys here."""
    monkeypatch.setattr(attention, "DIRECT_LENGTH", direct_length)
    lengths = (1, 9, 3, 8, 30, 2, 7)
    trees = tuple((n,) for n in lengths)
    query, key, _ = make_inputs(60)
    value = torch.randn(60, GROUPS, 2 * WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    parts = [ContextPart(rank, ranks) for rank in range(ranks)]
    order = torch.cat([part.tokens(60) for part in parts])
    assert order.sort().values.tolist() == list(range(60))
    assert torch.equal(order[parts[0].places(60)], torch.arange(60))
    gathered = [key[order], value[order]]  # what the ranks' communication brings
    outputs = [attend(query[part.tokens(60)], *gathered, Segments.of(trees, CPU, part)) for part in parts]
    found = torch.cat(outputs)[parts[0].places(60)]
    expected = each_alone([query, key, value], lengths)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, [query, key, value], upstream),
        torch.autograd.grad(expected, [query, key, value], upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_offsets_of_a_part_are_those_of_its_runs() -> None:
    """Eight tokens on two ranks: the second has the tokens 2 to 5, of segments that begin at 0 and at 3."""
    segments = Segments.of(((3,), (5,)), CPU, ContextPart(1, 2))
    assert segments.cu_seqlens_q.tolist() == [0, 1, 2, 4]
    assert segments.cu_seqlens_kv.tolist() == [0, 3, 4, 7]
    assert (segments.max_seqlen_q, segments.max_seqlen_kv) == (2, 3)
    # Gathered, the tokens lie as 0 1 6 7 2 3 4 5: the keys 0 1 2, then 3, then 3 4 5.
    assert segments.keys_of_runs.tokens.tolist() == [0, 1, 4, 5, 5, 6, 7]
