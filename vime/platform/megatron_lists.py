"""Operations on lists of tensors, in few launches where neither Apex nor Transformer Engine is installed.

Megatron's own fallbacks go through the list one by one, and the norm waits for the device once a tensor: with an expert
a parameter these are thousands. Sites in megatron-core 0.16.1: the functions in ``utils.py``, which two modules import
by name, and a copy of which one says that there is no other for bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.platform.megatron_on_cpu import Site

__all__ = ["SITES", "use_lists"]

SITES = (
    Site("utils.py", 1205, "l2 = [[(torch.norm(tensor)) for tensor in tensor_list]"),
    Site("utils.py", 1215, "dst.copy_(src * scale)"),
    Site("optimizer/clip_grads.py", 41, "multi_tensor_applier = local_multi_tensor_applier"),
    Site("optimizer/optimizer.py", 93, "that_.copy_(this_)"),
)


def use_lists() -> None:
    """Replaces the fallbacks, where Megatron uses them."""
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.utils import local_multi_tensor_scale

    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.l2_norm_impl = _norm
        clip_grads.multi_tensor_scale_impl = optimizer.multi_tensor_scale_impl = _scale
        optimizer._multi_tensor_copy_this_to_that = _copy


def _norm(chunk_size: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """The norm of all numbers together, float32 [1]."""
    norms = [norm for tensors in lists for norm in torch._foreach_norm(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms)).float()[None], None


@torch.no_grad()
def _scale(chunk_size: int, noop: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """The second list becomes the first one, or itself, times a number."""
    source, target = lists
    if not target:  # of a rank whose shard has nothing of a group
        return
    if source is target:
        torch._foreach_mul_(target, factor)
    else:
        torch._foreach_copy_(target, source if factor == 1 else torch._foreach_mul(source, factor))


@torch.no_grad()
def _copy(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    if this:
        torch._foreach_copy_(that, this)
