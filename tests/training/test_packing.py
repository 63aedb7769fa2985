"""Packs: where response tokens are predicted, and what comes with them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.training.harness import make_samples
from vime.training.layers.context import ContextPart
from vime.training.packing import Packer
from vime.types import InvalidSample, TrainSample

PACKER = Packer(device=torch.device("cpu"), dtype=torch.float32)


def sample(tokens: tuple[int, ...], response_length: int) -> TrainSample:
    return TrainSample(
        index=7,
        group_index=3,
        tokens=tokens,
        response_length=response_length,
        loss_mask=(1,) * response_length,
        rollout_log_probs=None,
        weight_versions=(),
        raw_reward=0.0,
        reward=0.5,
    )


def test_response_tokens_are_predicted_from_the_token_before() -> None:
    """The last token of a sample predicts nothing that is asked for, so it is left out."""
    pack = PACKER.pack([sample((10, 11, 12, 13), 2), sample((20, 21, 22), 1)])
    assert pack.tokens_l.tolist() == [10, 11, 12, 20, 21]
    assert pack.positions_l.tolist() == [0, 1, 2, 0, 1]
    assert pack.predictors_p.tolist() == [1, 2, 4]
    assert pack.targets_t.tolist() == [12, 13, 22]
    assert pack.lengths_n.tolist() == [2, 1]
    assert pack.segments.trees == ((3,), (2,))


def test_a_prompt_that_samples_share_is_there_once() -> None:
    samples = [sample((1, 2, 30, 31, 32), 3), sample((7, 8), 1), sample((1, 2, 40, 41), 2)]
    pack = dataclasses.replace(PACKER, tree_tokens=7).pack(samples)
    assert pack.tokens_l.tolist() == [1, 2, 30, 31, 40, 7]
    assert pack.positions_l.tolist() == [0, 1, 2, 3, 2, 0]
    assert pack.segments.trees == ((2, 2, 1), (1,))
    assert pack.predictors_p.tolist() == [1, 2, 3, 5, 1, 4]
    assert pack.targets_t.tolist() == [30, 31, 32, 8, 40, 41]


def test_a_tree_has_no_more_tokens_than_allowed() -> None:
    samples = [sample((1, 2, 30 + i, 40 + i), 2) for i in range(5)]
    pack = dataclasses.replace(PACKER, tree_tokens=6).pack(samples)
    assert pack.segments.trees == ((2, 1, 1), (2, 1, 1), (3,))


def test_filling_up_to_a_multiple_adds_a_segment_that_nobody_looks_at() -> None:
    pack = dataclasses.replace(PACKER, multiple=8).pack([sample((10, 11, 12, 13), 2), sample((20, 21), 1)])
    assert pack.segments.trees == ((3,), (1,), (4,))
    assert len(pack.tokens_l) == 8
    assert pack.predictors_p.max() < 4
    assert pack.segments.filling is not None
    assert pack.segments.filling.tolist() == [False] * 4 + [True] * 4


def test_log_probs_of_the_engine_come_along_when_every_sample_has_them() -> None:
    samples = make_samples(2)
    expected = samples[0].rollout_log_probs + samples[1].rollout_log_probs  # type: ignore[operator]
    torch.testing.assert_close(PACKER.pack(samples).rollout_log_probs_t, torch.tensor(expected))
    assert PACKER.pack([*samples, sample((1, 2), 1)]).rollout_log_probs_t is None


def test_a_sample_without_a_prompt_is_refused_by_name() -> None:
    with pytest.raises(InvalidSample, match=r"sample 7 \(group 3\) has no prompt token"):
        PACKER.pack([sample((1, 2), 2)])


def test_context_parallel_ranks_have_parts_of_the_pack_and_know_whose_tokens_they_predict() -> None:
    """Eight tokens in four chunks: rank 0 has the first and the last, rank 1 those between."""
    samples = [sample((10, 11, 12, 13, 14), 2), sample((20, 21, 22, 23), 3)]
    packs = [
        dataclasses.replace(PACKER, multiple=4, part=ContextPart(rank, 2)).pack(samples) for rank in range(2)
    ]  # 10 11 | 12 13 | 20 21 | 22 and one to fill up
    assert [pack.tokens_l.tolist() for pack in packs] == [[10, 11, 22, 0], [12, 13, 20, 21]]
    assert [pack.positions_l.tolist() for pack in packs] == [[0, 1, 2, 0], [2, 3, 0, 1]]
    assert [pack.predictors_p.tolist() for pack in packs] == [[2], [0, 1, 2, 3]]
    assert [pack.predicted_p.tolist() for pack in packs] == [[4], [0, 1, 2, 3]]
    for pack in packs:
        assert pack.targets_t.tolist() == [13, 14, 21, 22, 23]
        assert pack.lengths_n.tolist() == [2, 3]


def test_a_draft_layer_is_given_the_next_tokens_and_predicts_those_after_them() -> None:
    """Of the second sample nothing comes two before the first response token, of the third one all is in the prompt."""
    samples = [sample((10, 11, 12, 13), 2), sample((20, 21, 22), 2), sample((30, 31, 32), 1)]
    pack = dataclasses.replace(PACKER, ahead=True).pack(samples)
    assert pack.tokens_l.tolist() == [10, 11, 12, 20, 21, 30, 31]
    assert pack.targets_t.tolist() == [12, 13, 21, 22, 32]
    assert pack.ahead is not None
    assert pack.ahead.following_l.tolist() == [11, 12, 13, 21, 22, 31, 32]
    assert pack.ahead.predictors_p.tolist() == [0, 1, 3, 5]
    assert pack.ahead.predicted_p.tolist() == [0, 1, 3, 4]


def test_context_parallel_ranks_have_the_next_tokens_of_the_whole_pack() -> None:
    """The parts of the test above: what follows a chunk's last token is on the other rank, and known here."""
    samples = [sample((10, 11, 12, 13, 14), 2), sample((20, 21, 22, 23), 3)]
    packer = dataclasses.replace(PACKER, multiple=4, ahead=True)
    packs = [dataclasses.replace(packer, part=ContextPart(rank, 2)).pack(samples) for rank in range(2)]
    aheads = [pack.ahead for pack in packs]
    assert [ahead.following_l.tolist()[:3] for ahead in aheads if ahead] == [[11, 12, 23], [13, 14, 21]]
    assert [ahead.predictors_p.tolist() for ahead in aheads if ahead] == [[1], [0, 2, 3]]
    assert [ahead.predicted_p.tolist() for ahead in aheads if ahead] == [[0], [1, 3, 4]]
