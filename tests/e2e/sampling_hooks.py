"""Functions that watch a sampling loop: what it finished, and what it took up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.data.codec import sample_to_json
from vime.types import Group, Sample


async def one_of_eight_tells_nothing(args: Any, sample: Sample) -> float:
    """The two answers of a group are worth 0 and 1, but those of each eighth group are both worth 0.

    Of eight neighbours in flight more than four are always worth training on, whatever finishes first: a rollout
    of four ends while others wait.
    """
    assert sample.group_index is not None and sample.index is not None
    return 0.0 if sample.group_index % 8 == 0 else float(sample.index % 2)


def note_buffer(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Takes the groups that have waited longest, and notes what waited."""
    note(args, "buffer.jsonl", buffer)
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def note_finished(args: Any, all_samples: list[Group], data_source: Any) -> None:
    """Notes all finished groups of a rollout."""
    note(args, "finished.jsonl", all_samples)


def note(args: Any, name: str, groups: list[Group]) -> None:
    """Adds a line."""
    line = json.dumps([[sample_to_json(sample) for sample in group] for group in groups])
    with (Path(args.run_dir) / name).open("a") as file:
        file.write(line + "\n")
