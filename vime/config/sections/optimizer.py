"""The optimizer and its learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Names and meanings are Megatron's."""

    optimizer: Literal["adam"] = flag("adam", help="The optimizer; adam is AdamW.")
    lr: float = flag(1e-6, help="Learning rate after the warm-up.")
    min_lr: float = flag(0.0, help="The learning rate does not decay below this.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = flag(
        "constant", help="How the learning rate decays."
    )
    lr_decay_iters: int | None = flag(None, help="Steps of the decay; all steps of the run otherwise.")
    lr_warmup_iters: int = flag(0, help="Steps over which the learning rate rises linearly.")
    lr_warmup_fraction: float | None = flag(None, help="The same as a share of --lr-decay-iters.")
    lr_warmup_init: float = flag(0.0, help="Learning rate at the start of the warm-up.")
    weight_decay: float = flag(0.01, help="Decoupled weight decay.")
    adam_beta1: float = flag(0.9, help="Decay of Adam's first moment.")
    adam_beta2: float = flag(0.999, help="Decay of Adam's second moment.")
    adam_eps: float = flag(1e-8, help="Added to Adam's denominator.")
    only_train_params_name_list: tuple[str, ...] = flag(
        (), help="Regular expressions: only the actor's parameters whose names contain one of them are trained."
    )
    freeze_params_name_list: tuple[str, ...] = flag(
        (), help="Regular expressions: the actor's parameters whose names contain one of them are not trained."
    )
    clip_grad: float = flag(1.0, help="Gradients are scaled down to this global norm; 0 switches it off.")
