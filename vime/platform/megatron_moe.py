"""The patch that lets Megatron's routers run where Transformer Engine is not installed, on any device.

Site in megatron-core 0.16.1: ``transformer/moe/moe_utils.py:1192`` asks whether ``te_general_gemm`` is None, but the
name exists only where importing Transformer Engine succeeded.
"""

from __future__ import annotations

from vime.platform.megatron_on_cpu import Site

__all__ = ["SITES", "define_missing_gemm"]

SITES = (
    Site("transformer/moe/moe_utils.py", 1192, "if te_general_gemm is not None"),
    Site("transformer/moe/moe_utils.py", 1225, "if te_general_gemm is not None"),
)


def define_missing_gemm() -> None:
    """Defines the name as what it is without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
