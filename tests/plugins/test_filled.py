"""What a custom function may put into a sample, and how it is told what it may not."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from vime.plugins.answers import Identity, generated_sample, groups_and_metrics, new_groups
from vime.plugins.contract import WrongAnswer
from vime.plugins.train_data import train_rows
from vime.types import Sample, Status

VOCABULARY = 100


def filled(**fields: Any) -> Sample:
    known = {"index": 7, "group_index": 2, "rollout_id": 1, "label": "5", "status": Status.COMPLETED}
    known |= {"tokens": [1, 2, 3, 99], "response_length": 2, "response": "r", "rollout_log_probs": [-0.5, 0.0]}
    return Sample(**(known | fields))


def read(sample: Sample) -> Sample:
    return generated_sample(sample, Identity(7, 2, "5"), vocab_size=VOCABULARY)


ID = "it must be a token id, a whole number from 0 below the 100 of the vocabulary"
LOG_PROB = "it must be a log-prob, a finite number of at most 0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [1, 2, 3, -3]}, f"tokens[3] is int -3, {ID}"),
        ({"tokens": [1, 2, 3, 100]}, f"tokens[3] is int 100, {ID}"),
        ({"tokens": [1, 2, 10**12, 3]}, f"tokens[2] is int 1000000000000, {ID}"),
        ({"tokens": [1, 2, 10**30, 3]}, f"tokens[2] is int 1{'0' * 30}, {ID}"),
        ({"tokens": [1, 2, 3.5, 3]}, f"tokens[2] is float 3.5, {ID}"),
        ({"tokens": [1, 2, 3.0, 3]}, f"tokens[2] is float 3.0, {ID}"),
        ({"tokens": [1, "3", 2, 3]}, f"tokens[1] is str '3', {ID}"),
        ({"tokens": [1, None, 2, 3]}, f"tokens[1] is NoneType None, {ID}"),
        ({"tokens": None}, "tokens is NoneType None, it must be a list of numbers"),
        ({"tokens": [1, 2, 3, -3], "status": Status.ABORTED}, "tokens[3] is int -3"),
        ({"rollout_log_probs": [-0.5, 5.0]}, f"rollout_log_probs[1] is float 5.0, {LOG_PROB}"),
        ({"rollout_log_probs": [math.nan, 0.0]}, f"rollout_log_probs[0] is float nan, {LOG_PROB}"),
        ({"rollout_log_probs": [-math.inf, 0.0]}, f"rollout_log_probs[0] is float -inf, {LOG_PROB}"),
        ({"rollout_log_probs": [None, 0.0]}, f"rollout_log_probs[0] is NoneType None, {LOG_PROB}"),
        ({"teacher_log_probs": [-1, 1]}, f"teacher_log_probs[1] is int 1, {LOG_PROB}"),
        ({"loss_mask": [1, 2]}, "loss_mask[1] is int 2, it must be 0 or 1"),
        ({"loss_mask": [[1], [0]]}, "loss_mask[0] is list [1], it must be 0 or 1"),
        ({"weight_versions": [1, -1]}, "weight_versions[1] is int -1, it must be a whole number from 0"),
        ({"response_length": 2.0}, "response_length is float 2.0, it must be a whole number"),
        ({"response": None}, "response is NoneType None, it must be str"),
        ({"metadata": None}, "metadata is None; it must be a dict"),
        ({"metadata": {"a": [1, {2}]}}, "metadata['a'][1] is of type set; it must be what JSON can hold"),
        ({"status": "completed"}, "status is str 'completed', it must be Status"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_sample_and_place(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongAnswer) as caught:
        read(filled(**fields))
    where = "returned a sample that breaks a rule: sample 7 (group 2, rollout 2): "
    assert str(caught.value).startswith(where + message)


def test_a_changed_label_is_refused() -> None:
    with pytest.raises(WrongAnswer, match=r"must not change sample\.label from str '5' to str '6'"):
        read(filled(label="6"))


def test_numbers_of_numpy_become_python_s_and_log_probs_may_be_rounded() -> None:
    sample = read(
        filled(
            tokens=np.array([1, 2, 3, 4], np.int32),
            rollout_log_probs=[np.float32(-0.5), 1e-6],
            loss_mask=[True, np.int64(0)],
            weight_versions=np.array([3, 3]),
            response_length=np.int64(2),
        )
    )
    assert sample.tokens == [1, 2, 3, 4] and {type(token) for token in sample.tokens} == {int}
    assert sample.rollout_log_probs == [-0.5, 1e-6] and type(sample.rollout_log_probs[0]) is float
    assert (sample.loss_mask, sample.weight_versions) == ([1, 0], [3, 3])
    assert type(sample.response_length) is int


def test_long_samples_are_checked_without_a_look_at_each_token() -> None:
    count = 200_000
    sample = filled(tokens=[5] * (count + 1), response_length=count, rollout_log_probs=[-1.0] * count)
    took_s = []
    for _ in range(5):
        begin = time.process_time()
        read(sample)
        took_s.append(time.process_time() - begin)
    assert min(took_s) < 0.15  # 0.02 s; with a look at each in Python 0.3 s


GROUPS = [[filled(index=0, group_index=0)], [filled(index=1, group_index=1)], [filled(index=2, group_index=0)]]


@pytest.mark.parametrize("reader", [groups_and_metrics, lambda groups: new_groups(groups, 3)])
def test_two_groups_with_one_index_would_share_a_baseline_and_are_refused(reader: Any) -> None:
    with pytest.raises(WrongAnswer, match="two groups with the group_index 0, the second in place 2"):
        reader(GROUPS)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"tokens": [[1, 2, 3, -3]]}, "gave tokens[0][3] = -3; a token id is from 0 to below 100"),
        ({"tokens": [[1, 2, 3, 100]]}, "gave tokens[0][3] = 100"),
        ({"rollout_log_probs": [[-1.0, 5.0]]}, "gave rollout_log_probs[0][1] = 5; a log-prob is at most 0"),
    ],
)
def test_rows_of_a_custom_conversion_are_checked_too(column: dict[str, Any], message: str) -> None:
    rows = {"tokens": [[1, 2, 3, 4]], "response_lengths": [2], "rewards": [1.0]}
    with pytest.raises(WrongAnswer) as caught:
        train_rows(rows | column, [filled(reward=1.0)], vocab_size=VOCABULARY)
    assert message in str(caught.value)
