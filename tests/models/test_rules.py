"""Merging and splitting are inverse, and a merge of cut HF tensors is the cut of the merged ones."""

from __future__ import annotations

import torch

from vime.models.rules import GatedConcat, HfTensor, QkvInterleave, WeightRule

HEADS_PER_GROUP, CHANNELS, GROUPS, HIDDEN = 2, 3, 4, 5
QKV = QkvInterleave(HEADS_PER_GROUP, CHANNELS)


def qkv_parts(*trailing: int) -> list[torch.Tensor]:
    rows = [GROUPS * HEADS_PER_GROUP * CHANNELS, GROUPS * CHANNELS, GROUPS * CHANNELS]
    return [torch.randn(n, *trailing) for n in rows]


def test_qkv_goes_group_after_group() -> None:
    q, k, v = (torch.arange(n) + base for n, base in ((24, 100), (12, 200), (12, 300)))
    merged = QKV.merge([q, k, v])
    assert merged[:12].tolist() == [100, 101, 102, 103, 104, 105, 200, 201, 202, 300, 301, 302]
    assert merged[12:18].tolist() == [106, 107, 108, 109, 110, 111]


def test_qkv_split_is_the_inverse_for_weights_and_biases() -> None:
    for parts in (qkv_parts(HIDDEN), qkv_parts()):
        for part, back in zip(parts, QKV.split(QKV.merge(parts)), strict=True):
            assert torch.equal(part, back)


def test_a_tensor_parallel_shard_of_qkv_is_the_merge_of_cut_parts() -> None:
    parts = qkv_parts(HIDDEN)
    cut = [part.chunk(2)[1] for part in parts]
    assert torch.equal(QKV.merge(cut), QKV.merge(parts).chunk(2)[1])


def test_gate_stands_over_up_on_every_rank() -> None:
    gate, up = torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
    shard = GatedConcat().merge([gate.chunk(2)[1], up.chunk(2)[1]])
    assert torch.equal(shard, torch.cat([gate[2:], up[2:]]))
    assert all(torch.equal(a, b) for a, b in zip(GatedConcat().split(shard), (gate[2:], up[2:]), strict=True))


def test_each_half_of_a_fused_projection_is_cut_for_itself() -> None:
    """gate over up, two rows each, on two ranks: the first has row 0 of both halves."""
    fused = HfTensor("gate_up_proj.weight", (4, 3))
    rule = WeightRule(megatron="linear_fc1.weight", hf=(fused,), tp_dim=0, tp_parts=2)
    assert [rule.shard_edges(fused, rank, 2) for rank in range(2)] == [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    whole = torch.arange(12).view(4, 3)
    shards = [whole[[0, 2]], whole[[1, 3]]]
    assert torch.equal(rule.join_shards(shards), whole)
