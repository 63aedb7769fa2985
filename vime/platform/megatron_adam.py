"""The patch that lets Megatron use an Adam of ours where neither Apex nor Transformer Engine is installed.

Sites in megatron-core 0.16.1: ``optimizer/__init__.py:359`` picks torch.optim.AdamW by a module constant;
``optimizer/distrib_optimizer.py`` asks HAVE_APEX_OR_TE before it saves and loads moments, and copies loaded fp32
weights into leaf views in place without ``no_grad`` (line 940).
"""

from __future__ import annotations

from typing import Any

import torch

from vime.platform.megatron_on_cpu import Site

__all__ = ["SITES", "use_adam"]

SITES = (
    Site("optimizer/__init__.py", 359, "if USING_PYTORCH_OPTIMIZER:"),
    Site("optimizer/distrib_optimizer.py", 642, "assert len(steps) == 1"),
)


def use_adam(adam: type[Any]) -> None:
    """Makes Megatron build ``adam`` (with the signature of Apex's FusedAdam). Does nothing where it has a fused one."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = adam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = adam, True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    cls = distrib_optimizer.DistributedOptimizer
    cls._set_main_param_and_optimizer_states = torch.no_grad()(cls._set_main_param_and_optimizer_states)
