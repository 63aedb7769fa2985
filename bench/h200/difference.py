"""How far trainer and engine are apart in the log-probs of the tokens that were sampled, beside what rounding costs.

    python -m bench.h200.difference                  # one GPU, SmolLM2-135M-Instruct; two minutes
    python -m bench.h200.difference --prompts 4      # on a CPU, to see that it runs

For each precision an engine serves the model, answers sums of the demo's task with 64 tokens at temperature 1, and
vime's training worker, with the model in the same precision, says what it gives those tokens. Printed, by precision,
are means of absolute differences in nats a token:

* ``trainer_engine``: the one that importance ratios have to bear.
* ``floor``: transformers in that precision from transformers in float32, same tokens, same device. It is what rounding
  costs one implementation alone; two that round independently are further from each other.
* ``trainer_float32``, ``engine_float32``: each side from transformers in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.h200.rollout import machine
from bench.training.vime_side import make_worker
from bench.work import MODEL, TASK, demo_flags
from vime.config import Config, parse_config
from vime.platform import current
from vime.serving.client import RouterClient
from vime.serving.control import EngineControl
from vime.serving.engine import EngineServer
from vime.types import Generation, SamplingParams

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PROMPTS, SAMPLES, RESPONSE = 32, 8, 64
KV_BYTES = (2 << 30) if torch.cuda.is_available() else (256 << 20)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine sampled."""

    prompt: list[int]
    generation: Generation

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.generation.token_ids]


def make_config(precision: str) -> Config:
    """Of the demo, with trainer and engine beside each other."""
    words = [word for word in demo_flags() if word != "--colocate"]
    words += ["--rollout-num-gpus", "1", "--num-rollout", "1", f"--{precision}"]
    words += ["--vllm-kv-cache-memory-bytes", str(KV_BYTES), "--vllm-enforce-eager"]
    words += ["--vllm-gpu-memory-utilization", "0.1"] if torch.cuda.is_available() else []
    return parse_config(words)


def prompts(count: int) -> list[list[int]]:
    """Token ids of the task's questions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [json.loads(line)["prompt"] for line in (TASK / "train.jsonl").read_text().splitlines()[:count]]
    return [tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False) for row in rows]


async def sampled(server: EngineServer, questions: Sequence[list[int]], samples: int) -> list[Answer]:
    control = EngineControl(server.url, server.name)
    client = RouterClient(server.url, [control])

    async def one(prompt: list[int], seed: int) -> Answer:
        params = SamplingParams(max_tokens=RESPONSE, temperature=1.0, seed=seed)
        return Answer(prompt, await client.generate(prompt, params, session_id=str(seed)))

    try:
        wanted = [(prompt, i * samples + k) for i, prompt in enumerate(questions) for k in range(samples)]
        return list(await asyncio.gather(*(one(prompt, seed) for prompt, seed in wanted)))
    finally:
        await client.close()
        await control.close()


def of_trainer(config: Config, answers: Sequence[Answer]) -> Tensor:
    """Log-probs of all sampled tokens, one after the other, float32 [T]."""
    worker = make_worker(config)
    try:
        return torch.tensor([x for each in answers for x in worker.log_probs_of(each.tokens, len(each.prompt))])
    finally:
        worker.stop()


@torch.no_grad()
def of_transformers(dtype: torch.dtype, answers: Sequence[Answer]) -> Tensor:
    """The same by transformers in that precision; log-softmax in float32."""
    from transformers import AutoModelForCausalLM

    device = current().device()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).to(device).eval()
    found = []
    for each in answers:
        ids = torch.tensor([each.tokens], device=device)
        first = len(each.prompt)
        log_probs = torch.log_softmax(model(ids).logits[0, first - 1 : -1].float(), -1)
        found.append(log_probs.gather(1, ids[0, first:, None])[:, 0].cpu())
    return torch.cat(found)


def compare(config: Config, dtype: torch.dtype, answers: Sequence[Answer]) -> dict[str, Any]:
    engine = torch.tensor([x for each in answers for x in each.generation.log_probs])
    trainer, rounded, exact = (
        of_trainer(config, answers),
        of_transformers(dtype, answers),
        of_transformers(torch.float32, answers),
    )
    pairs = {
        "trainer_engine": (trainer, engine),
        "floor": (rounded, exact),
        "trainer_float32": (trainer, exact),
        "engine_float32": (engine, exact),
    }
    means = {name: round(float((one - other).abs().mean()), 5) for name, (one, other) in pairs.items()}
    return {"tokens": len(engine), "mean_log_prob": round(float(exact.mean()), 3), **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="answers to each prompt")
    parser.add_argument("--only", choices=tuple(DTYPES), action="append", help="one precision; all otherwise")
    given = parser.parse_args()
    for path in (MODEL / "model.safetensors", TASK / "train.jsonl"):
        if not path.is_file():
            sys.exit(f"there is no {path}; tools/fetch_smollm2.py and tools/make_arithmetic.py make them")
    names = given.only or list(DTYPES)
    configs = {name: make_config(name) for name in names}
    device = ("0",) if torch.cuda.is_available() else ()
    with tempfile.TemporaryDirectory(prefix="vime-difference-") as scratch, ExitStack() as stack:
        servers = {
            name: EngineServer.from_config(config, index=i, devices=device, threads=1, log_dir=Path(scratch))
            for i, (name, config) in enumerate(configs.items())
        }
        for server in servers.values():
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as starting:
            list(starting.map(EngineServer.start, servers.values()))
        questions = prompts(given.prompts)
        answers = {name: asyncio.run(sampled(server, questions, given.samples)) for name, server in servers.items()}
    found = {name: compare(configs[name], DTYPES[name], answers[name]) for name in names}
    for each in found.values():
        each["ratio_to_floor"] = round(each["trainer_engine"] / each["floor"], 3)
    print(json.dumps({**machine(), "model": MODEL.name, "precisions": found}), flush=True)


if __name__ == "__main__":
    main()
