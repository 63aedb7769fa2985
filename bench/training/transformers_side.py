"""GRPO steps with transformers and torch alone, as one would write them by hand. One step a request.

    python -m bench.training.transformers_side MODE

bf16 compute and fp32 master weights, in the two usual ways; the measure takes the faster one:
* ``autocast``: fp32 parameters, products in bf16 under torch.autocast;
* ``copy``: bf16 parameters and gradients, and an fp32 copy of the parameters that the optimizer updates.

Attention is sdpa. Samples of a work are equally long, so there is no padding and no mask. The output layer runs on the
positions before response tokens only (``logits_to_keep``). AdamW is torch's fused one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.protocol import SideChannel
from bench.work import MODEL, TrainingWork, demo_config

CONFIG = demo_config()
assert CONFIG.batch.max_tokens_per_gpu is not None, "the demo packs by tokens"
MICRO_BATCH_TOKENS = CONFIG.batch.max_tokens_per_gpu
CLIP_LOW, CLIP_HIGH = CONFIG.algorithm.eps_clip, CONFIG.algorithm.eps_clip_high
CLIP_GRAD = CONFIG.optimizer.clip_grad


class Autocast:
    """fp32 parameters; each forward pass computes in bf16."""

    def __init__(self) -> None:
        self.model = _load(torch.float32)
        self._optimizer = _adamw(list(self.model.parameters()))

    def logits(self, tokens_bl: Tensor, keep: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _logits(self.model, tokens_bl, keep)

    def update(self) -> float:
        """Clips, steps, and returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


class MasterCopy:
    """bf16 parameters; the optimizer updates an fp32 copy of them."""

    def __init__(self) -> None:
        self.model = _load(torch.bfloat16)
        self._parameters = list(self.model.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._parameters]
        self._optimizer = _adamw(self._masters)

    def logits(self, tokens_bl: Tensor, keep: int) -> Tensor:
        return _logits(self.model, tokens_bl, keep)

    def update(self) -> float:
        """Clips, steps, copies back, and returns the gradient norm before clipping."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, CLIP_GRAD, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        return float(norm)


MODES: dict[str, Callable[[], Autocast | MasterCopy]] = {"autocast": Autocast, "copy": MasterCopy}


def _load(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation="sdpa").train()


def _adamw(parameters: list[Tensor]) -> torch.optim.AdamW:
    given = CONFIG.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=given.lr,
        betas=(given.adam_beta1, given.adam_beta2),
        eps=given.adam_eps,
        weight_decay=given.weight_decay,
        fused=True,
    )


def _logits(model: Any, tokens_bl: Tensor, keep: int) -> Tensor:
    """Those after which the last ``keep`` tokens come, [B, keep, V]."""
    logits: Tensor = model(input_ids=tokens_bl, use_cache=False, logits_to_keep=keep + 1).logits
    return logits[:, :-1]


def grpo_loss(logits_btv: Tensor, targets_bt: Tensor, advantages_b: Tensor) -> Tensor:
    """The clipped objective, a mean over the tokens of each sample, summed over samples. The old policy is the present
    one, as in the first step on a rollout."""
    log_probs = -F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten(), reduction="none")
    log_probs_bt = log_probs.view_as(targets_bt)
    ratio = torch.exp(log_probs_bt - log_probs_bt.detach())
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    advantages = advantages_b[:, None]
    return -torch.minimum(ratio * advantages, clipped * advantages).mean(-1).sum()


def step(side: Autocast | MasterCopy, work: TrainingWork) -> float:
    """One optimizer step; returns the gradient norm."""
    tokens, advantages = torch.tensor(work.token_ids()), torch.tensor(work.advantages())
    size = work.micro_batch(MICRO_BATCH_TOKENS)
    for tokens_bl, advantages_b in zip(torch.split(tokens, size), torch.split(advantages, size), strict=True):
        logits = side.logits(tokens_bl, work.response)
        loss = grpo_loss(logits, tokens_bl[:, -work.response :], advantages_b) / work.samples
        torch.autograd.backward(loss)
    return side.update()


def main() -> None:
    side = MODES[sys.argv[1]]()
    channel = SideChannel()
    channel.reply(ready=True)
    for request in channel.requests():
        work = TrainingWork.from_json(request)
        begin = time.perf_counter()
        norm = step(side, work)
        channel.reply(seconds=time.perf_counter() - begin, grad_norm=norm)


if __name__ == "__main__":
    main()
