"""Values to try custom functions on: samples in every state that a run knows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vime.data.jsonl import Row
from vime.types import Grade, Group, Sample, Status

if TYPE_CHECKING:
    from vime.plugins.trial import Trial

ROLLOUT_ID = 3
PROMPT_TOKENS = [11, 12, 13, 14, 15]
ROWS = (
    Row(1, "What is 2 + 3?", "5", {}),
    Row(2, [{"role": "user", "content": "What is 10 - 4?"}], "6", {}),
)


def fresh_sample(row: Row = ROWS[0], *, index: int = 0, group: int = 0) -> Sample:
    """A sample as it comes from the data source."""
    return Sample(
        group_index=group,
        index=index,
        rollout_id=ROLLOUT_ID,
        prompt=copy.deepcopy(row.prompt),
        label=row.label,
        metadata=copy.deepcopy(row.metadata),
        session_id=f"check-{index}",
    )


def finished_sample(
    row: Row = ROWS[0],
    *,
    index: int = 0,
    group: int = 0,
    length: int = 6,
    response: str | None = None,
    status: Status = Status.COMPLETED,
) -> Sample:
    """A sample that was generated, but not graded yet."""
    sample = fresh_sample(row, index=index, group=group)
    sample.tokens = [*PROMPT_TOKENS, *range(100, 100 + length)]
    sample.response = f"The answer is {sample.label}." if response is None else response
    sample.response_length = length
    sample.rollout_log_probs = [-0.25 * (1 + i % 4) for i in range(length)]
    sample.weight_versions = [1] * length
    sample.status = status
    return sample


def reward_cases(trial: Trial) -> Iterator[tuple[str, Sample]]:
    """Answers as graders meet them, each with the name of its case."""
    for number, row in enumerate(trial.rows or ROWS):
        kind = "a chat prompt" if isinstance(row.prompt, list) else "a complete answer"
        yield f"the row of line {row.line}" if trial.rows else kind, finished_sample(row, index=number)
    row = (trial.rows or ROWS)[0]
    yield "a truncated answer", finished_sample(row, response="The answer", length=2, status=Status.TRUNCATED)
    yield "an empty answer", finished_sample(row, response="", length=1)
    yield "an answer of odd characters", finished_sample(row, response="\\boxed{5 \U0001f600 {{%s} \t\n\\")


def graded_groups(trial: Trial, *, failures: bool = False) -> list[Group]:
    """Three groups of graded samples, uneven in size and with interleaved indices: some right, all right, all wrong.

    Args:
        failures: whether there are also a sample that failed and one whose grader failed, as filters meet them.
    """
    scores = ([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    rows = trial.rows or ROWS
    groups = []
    for number, group_scores in enumerate(scores):
        row = rows[number % len(rows)]
        groups.append(
            [
                _graded(finished_sample(row, index=4 * number + i, group=number, length=2 + i), score, trial)
                for i, score in enumerate(group_scores)
            ]
        )
    if failures:
        groups[0][1].status, groups[0][1].reward, groups[0][1].grade = Status.FAILED, None, None
        groups[2][0].reward, groups[2][0].grade = None, Grade.error("the grader took too long")
    return groups


def flat(groups: Sequence[Group]) -> list[Sample]:
    """All samples, by group."""
    return [sample for group in groups for sample in group]


def _graded(sample: Sample, score: float, trial: Trial) -> Sample:
    key = trial.args.reward_key
    sample.reward = score if key is None else {key: score}
    sample.grade = Grade(score=score, extra={} if key is None else {key: score})
    return sample


class Source:
    """Endless groups of fresh samples, as a rollout function gets them; implements ``ports.DataSource``."""

    def __init__(self, trial: Trial) -> None:
        self._rows, self._size, self._drawn = trial.rows or ROWS, trial.args.n_samples_per_prompt, 0

    def get_samples(self, n: int) -> list[Group]:
        return [self._draw() for _ in range(n)]

    def add_samples(self, groups: list[Group]) -> None:
        """Takes groups back; they are not drawn again."""

    def __len__(self) -> int:
        return len(self._rows)

    def _draw(self) -> Group:
        group, row = self._drawn, self._rows[self._drawn % len(self._rows)]
        self._drawn += 1
        return [fresh_sample(row, index=group * self._size + i, group=group) for i in range(self._size)]
