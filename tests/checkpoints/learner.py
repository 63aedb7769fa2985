"""A model with Megatron's optimizer that learns without data, the same in every parallel layout, bit for bit.

Each parameter's gradient is an elementwise function of the parameter, gradients are not clipped, and AdamW works
element by element, so no sum depends on the layout.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from vime.config import Config


def config_of(hf_dir: Path, *flags: str) -> Config:
    """A configuration as far as models and optimizers read it."""
    from vime.config.parse import resolve

    fixed = ["--lr", "0.01", "--clip-grad", "0", "--num-rollout", "100", "--weight-decay", "0.1"]
    fixed += ["--lr-decay-style", "linear", "--lr-warmup-iters", "3"]
    return resolve(["--hf-checkpoint", str(hf_dir), *fixed, *flags]).config


class Learner:
    """Model, optimizer and scheduler of this rank."""

    def __init__(self, hf_dir: Path, *flags: str) -> None:
        from vime.training.build import actor_shape, build_chunks, build_optimizer, build_scheduler
        from vime.training.weights_io import load_hf_weights

        config = config_of(hf_dir, *flags)
        self.shape = actor_shape(config)
        self.chunks = build_chunks(self.shape, config)
        load_hf_weights(self.chunks, self.shape, hf_dir)
        self.optimizer = build_optimizer(self.chunks, config)
        self.scheduler = build_scheduler(self.optimizer, config, total_steps=100)

    def learn(self, steps: int) -> None:
        for _ in range(steps):
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.main_grad.copy_(parameter.detach().float().sin() * 0.1 + 0.01)
            succeeded, _, _ = self.optimizer.step()
            assert succeeded
            self.scheduler.step(1)

    def weights(self) -> dict[str, torch.Tensor]:
        from vime.training.weights_io import hf_weights

        return {name: tensor.clone() for name, tensor in hf_weights(self.chunks, self.shape)}

    def everything(self) -> list[torch.Tensor]:
        """All that learning depends on: parameters, fp32 main parameters, moments, step count and learning rate."""
        found = [p.detach().clone() for chunk in self.chunks for p in chunk.parameters()]
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in each.optimizer.param_groups:
                found.append(
                    torch.tensor([float(group["step"]), group["lr"], group["weight_decay"]], dtype=torch.float64)
                )
                for parameter in group["params"]:
                    state = each.optimizer.state[parameter]
                    found += [t.detach().clone() for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        return found


def continue_on_this_layout() -> None:
    """For a process of several: learns, saves, learns on; or loads and learns on. Rank 0 writes the weights."""
    from safetensors.torch import save_file

    from tests.models.plain_megatron import parallel_layout

    layout = {key: int(os.environ[key.upper()]) for key in ("rank", "world", "port", "tp", "pp")}
    layout["ep"] = int(os.environ.get("EP", "1"))
    checkpoint = Path(os.environ["CHECKPOINT"])
    with parallel_layout(**layout):
        from vime.training.checkpoint import load_megatron, save_megatron

        sizes = ["--tensor-model-parallel-size", os.environ["TP"], "--pipeline-model-parallel-size", os.environ["PP"]]
        sizes += ["--expert-model-parallel-size", str(layout["ep"])]
        learner = Learner(Path(os.environ["HF"]), *sizes, *os.environ["FLAGS"].split())
        if os.environ["DO"] == "save":
            learner.learn(2)
            save_megatron(checkpoint, learner.chunks, learner.optimizer, learner.scheduler)
        else:
            load_megatron(checkpoint, learner.chunks, learner.optimizer, learner.scheduler)
        learner.learn(2)
        weights = learner.weights()
        if layout["rank"] == 0:
            save_file({name: t.contiguous() for name, t in weights.items()}, os.environ["OUT"])
