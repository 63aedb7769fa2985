"""Memory that log-probs, their entropy, a loss and its backward pass take above the hidden states.

    python -m bench.h200.loss_memory             # one H200: 16,384 tokens, the vocabulary and width of Qwen3-4B
    python -m bench.h200.loss_memory --tokens 64 --vocabulary 2048     # any machine, to see that it runs

``added_gib``: the most that was held at once beyond hidden states, output layer and the float32 buffer that Megatron
has for its gradient. Tokens times vocabulary in float32 alone would be 9.3 GiB.
"""

from __future__ import annotations

import argparse
import json

import torch

from bench.h200.model import QWEN3_4B
from bench.h200.rollout import machine
from vime.platform import current
from vime.training.logprobs import Vocabulary, token_log_probs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=QWEN3_4B["vocab_size"])
    given = parser.parse_args()
    width, device = int(str(QWEN3_4B["hidden_size"])), current().device()

    def random(rows: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device, dtype=torch.bfloat16).requires_grad_()

    hidden, weight = random(given.tokens), random(given.vocabulary)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    targets = torch.randint(given.vocabulary, (given.tokens,), device=device)
    added = []
    for _ in range(2):  # the first turn compiles kernels
        hidden.grad = weight.grad = None
        current().synchronize()
        current().reset_peak_memory()
        before = current().memory_gib()["allocated"]
        answer = token_log_probs(hidden, weight, targets, Vocabulary(0, given.vocabulary), adds=True)
        (answer.entropy_t.detach().mean() - answer.log_probs_t.mean()).backward()
        current().synchronize()
        added.append(round(current().memory_gib()["peak"] - before, 3))
    told = {"tokens": given.tokens, "vocabulary": given.vocabulary, "added_gib": added[-1]}
    print(json.dumps({**machine(), **told}), flush=True)


if __name__ == "__main__":
    main()
