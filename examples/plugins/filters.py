"""Which samples count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.observe.rollout_metrics import repeats_itself
from vime.types import Group, Sample


def remove_repetitions(args: Any, groups: list[Group]) -> None:
    """Does not train on answers that say the same thing again and again."""
    for sample in (sample for group in groups for sample in group):
        if repeats_itself(sample.response):
            sample.remove_sample = True


def mask_first_token(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Notes how the answer began, and does not train on its first token."""
    sample.metadata["opening"] = sample.response.partition("\n")[0][:40]
    if not evaluation and sample.response_length > 1:
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        sample.loss_mask = [0, *mask[1:]]


def rewards_differ(args: Any, samples: list[Sample], **_: Any) -> bool:
    """Keeps groups from which there is something to learn."""
    return len({sample.score(args.reward_key) for sample in samples if sample.reward is not None}) > 1


def longest_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Continues the groups that have come farthest."""
    buffer.sort(key=lambda group: sum(sample.response_length for sample in group), reverse=True)
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def keep_solved(args: Any, all_samples: list[Group], data_source: Any) -> None:
    """Keeps a list of the prompts that are solved every time."""
    solved = [
        group[0].prompt
        for group in all_samples
        if all(s.reward is not None and s.score(args.reward_key) >= 1 for s in group)
    ]
    with (Path(args.run_dir) / "solved.jsonl").open("a") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in solved)
