"""Times the steps of TRL's GRPOTrainer: one step a request, as bench/protocol.py says.

    .venv-trl/bin/python -m bench.trl.side --model DIR --prompts FILE --override '{"bf16": false}'

A step's time runs from TRL's on_step_begin to its on_step_end: generation with transformers, reward, the forward and
backward passes, clipping and the optimizer. The data loader, logging and saving are not in it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.protocol import SideChannel

CONFIG = Path(__file__).with_name("config.json")
MOST_STEPS = 1000  # the run ends when the requests end, long before


def last_number(completions: list[list[dict[str, str]]], label: list[str], **_: Any) -> list[float]:
    """1 where the last integer of the answer is the label, like vime's reward of that name."""
    answers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == want) for found, want in zip(answers, label, strict=True)]


class OneStepARequest(TrainerCallback):
    """Holds the trainer before each step until the measure asks for it, and answers with the step's seconds."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._requests: Iterator[dict[str, Any]] = channel.requests()
        self._begin = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if next(self._requests, None) is None:
            raise EndOfRequests
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._channel.reply(seconds=time.perf_counter() - self._begin)


class EndOfRequests(Exception):
    """The measure wants no more steps."""


def make_trainer(model: str, prompts: Path, overrides: dict[str, Any], output_dir: str, channel: SideChannel) -> Any:
    """GRPOTrainer with the committed config, on rows of ``prompt`` (messages) and ``label``."""
    config = json.loads(CONFIG.read_text()) | overrides
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    arguments = GRPOConfig(
        output_dir=output_dir, max_steps=MOST_STEPS, report_to=[], save_strategy="no", logging_strategy="no", **config
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=last_number,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[OneStepARequest(channel)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--override", type=json.loads, default={}, help="JSON object over config.json")
    arguments = parser.parse_args()
    channel = SideChannel()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arguments.model, arguments.prompts, arguments.override, folder, channel)
        channel.reply(ready=True)
        try:
            trainer.train()
        except EndOfRequests:
            return


if __name__ == "__main__":
    main()
