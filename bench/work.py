"""The work that the measures share: model, task, the demo's settings, and samples to train on."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.sides import Side
from vime.config import Config, parse_config

MODEL = Path("models/SmolLM2-135M-Instruct")
TASK = Path("data/arithmetic")
VOCABULARY = 49152
SCRIPT = Path("scripts/run-smollm2-135M-cpu.sh")
NOT_TAKEN = ("--save", "--num-rollout", "--eval-interval", "--eval-config")  # each measure has its own, or none


def demo_flags() -> list[str]:
    """The flags of the demo's script, without checkpoint, evaluation and the length of the run."""
    text = SCRIPT.read_text().replace("$MODEL", str(MODEL)).replace("$TASK", str(TASK))
    arrays = re.findall(r"^\w+_ARGS=\(\n(.*?)^\)", text, flags=re.MULTILINE | re.DOTALL)
    words = shlex.split("\n".join(arrays))
    return [word for i, word in enumerate(words) if word not in NOT_TAKEN and words[i - 1] not in NOT_TAKEN]


def demo_config(*flags: str) -> Config:
    """The demo's configuration, with further flags."""
    return parse_config([*demo_flags(), "--num-rollout", "1000", *flags])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """Samples of equal length, so that no side pads."""

    samples: int
    prompt: int  # tokens
    response: int  # tokens
    group: int = 8  # samples that share a prompt
    vocabulary: int = VOCABULARY

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def tokens(self) -> int:
        """Of one step, prompts included."""
        return self.samples * self.length

    def micro_batch(self, max_tokens: int) -> int:
        """Samples of one forward pass."""
        return min(self.samples, max_tokens // self.length)

    def token_ids(self) -> list[list[int]]:
        """[samples][length], the same in every process."""
        numbers = random.Random(0)

        def some(count: int) -> list[int]:
            return [numbers.randrange(self.vocabulary) for _ in range(count)]

        prompts = [some(self.prompt) for _ in range(self.samples // self.group)]
        return [prompts[i // self.group] + some(self.response) for i in range(self.samples)]

    def advantages(self) -> list[float]:
        """One a sample, as GRPO makes them from groups that are half right."""
        return [1.0 if i % 2 else -1.0 for i in range(self.samples)]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"tokens": self.tokens}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TrainingWork:
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})


def need_model() -> None:
    """Makes the model and the task where they are missing."""
    if not (MODEL / "model.safetensors").is_file():
        subprocess.run([sys.executable, "tools/fetch_smollm2.py", str(MODEL)], check=True, stdout=sys.stderr)
    if not (TASK / "train.jsonl").is_file():
        subprocess.run([sys.executable, "tools/make_arithmetic.py", str(TASK)], check=True, stdout=sys.stderr)


def threads() -> int:
    """Compute threads of every process that computes: all cores, because the sides take turns."""
    return os.cpu_count() or 1


def start_side(
    module: str,
    folder: Path,
    *arguments: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Side:
    """A side as a process that may compute on all cores and loads nothing from the network."""
    variables = {"OMP_NUM_THREADS": str(threads()), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    name = module.removeprefix("bench.").replace(".", "_")
    return Side([python, "-m", module, *arguments], folder / f"{name}.log", variables | dict(environment or {}))
