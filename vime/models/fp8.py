"""Weights in 8 bits with a scale for each block, as DeepSeek-V3 and Kimi-K2 publish them, read as bfloat16.

``NAME_scale_inv`` beside ``NAME`` holds what each block (mostly 128 × 128 weights) is to be multiplied by; at the lower
and right edge blocks may be cut off (https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UserError
from vime.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SCALE_SUFFIX", "block_of", "dequantised"]

SCALE_SUFFIX = "_scale_inv"


def block_of(hf_dir: Path) -> tuple[int, int] | None:
    """Rows and columns of the blocks that a model folder says its weights have; None: it has no 8-bit weights.

    Raises:
        UserError: the weights are quantised in another way.
    """
    path = hf_dir / "config.json"
    quantization: Any = read_json_object(path).get("quantization_config") if path.is_file() else None
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise UserError(f"{path}: 'quantization_config' must be an object, not {quantization!r:.60}")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2):
        raise UserError(
            f"{path}: quantization_config with quant_method={method!r}, weight_block_size={block!r} is not supported, "
            "only 'fp8' with blocks; use a checkpoint in bfloat16"
        )
    return int(block[0]), int(block[1])


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)) -> Tensor:
    """Weights [M, N] times their blocks' scales, in bfloat16.

    Args:
        scale: of the blocks that ``weight`` touches.
        first: row and column of ``weight``'s first element, counted from the beginning of its first block.
    """
    import torch

    for dim in (0, 1):
        scale = scale.repeat_interleave(block[dim], dim).narrow(dim, first[dim], weight.shape[dim])
    return (weight.float() * scale.float()).to(torch.bfloat16)
