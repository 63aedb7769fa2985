"""Prompts that are made up as they are needed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from vime.types import Group, Sample


class Additions:
    """Sums of two numbers, without end. Where it stands is kept beside the checkpoints."""

    def __init__(self, args: Any) -> None:
        self.size = args.n_samples_per_prompt
        self.seed = args.rollout_seed
        self.folder = Path(args.save or args.run_dir)
        self.drawn = 0
        self.waiting: list[Group] = []

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups that came back unfinished first, then new ones."""
        old, self.waiting = self.waiting[:num_samples], self.waiting[num_samples:]
        return old + [self.draw() for _ in range(num_samples - len(old))]

    def add_samples(self, groups: list[Group]) -> None:
        self.waiting += groups

    def save(self, rollout_id: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file(rollout_id).write_text(json.dumps({"drawn": self.drawn}))

    def load(self, rollout_id: int | None = None) -> None:
        if rollout_id is not None and self.file(rollout_id).exists():
            self.drawn = json.loads(self.file(rollout_id).read_text())["drawn"]

    def __len__(self) -> int:
        return 1000  # of one epoch, for --num-epoch

    def file(self, rollout_id: int) -> Path:
        return self.folder / f"additions_{rollout_id}.json"

    def draw(self) -> Group:
        group, self.drawn = self.drawn, self.drawn + 1
        a, b = random.Random(f"{self.seed} {group}").sample(range(100), 2)
        return [
            Sample(
                group_index=group,
                index=group * self.size + i,
                prompt=f"What is {a} + {b}?",
                label=str(a + b),
                session_id=f"additions-{group}-{i}",
            )
            for i in range(self.size)
        ]
