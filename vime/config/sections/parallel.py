"""How the model is spread over ranks and computed there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Names and meanings are Megatron's. Data parallelism takes the ranks that the other kinds leave."""

    tensor_model_parallel_size: int = flag(1, help="Ranks that share each layer.")
    sequence_parallel: bool = flag(False, help="Also share activations of norms and dropout. Advised with TP above 1.")
    pipeline_model_parallel_size: int = flag(1, help="Ranks that share the stack of layers.")
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, help="Pieces of the stack that each pipeline rank has; their micro-batches interleave."
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, help="Layers of one such piece: the other way to say how many there are."
    )
    context_parallel_size: int = flag(1, help="Ranks that share each sequence.")
    expert_model_parallel_size: int = flag(1, help="Ranks that share the experts of a mixture-of-experts layer.")
    expert_tensor_parallel_size: int = derived("tensor-model-parallel-size", help="Ranks that share each expert.")
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, help="Recompute activations in the backward pass to save memory."
    )
    recompute_method: Literal["uniform", "block"] | None = flag(None, help="How full recomputation picks its layers.")
    recompute_num_layers: int | None = flag(None, help="Layers of one recomputed unit.")
    use_distributed_optimizer: bool = flag(False, help="Share the optimizer state over data-parallel ranks.")
    bf16: bool = derived("unless --fp16 or --fp32", help="Compute and keep parameters in bfloat16, masters in fp32.")
    fp16: bool = flag(False, help="Compute and keep parameters in float16, with loss scaling.")
    fp32: bool = flag(False, help="Compute and keep parameters in float32.")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto", help="Implementation of attention; auto takes the best that is installed."
    )
    seed: int = flag(1234, help="Seed of the training processes.")

    def virtual_stages(self, num_layers: int | None) -> int | None:
        """The pieces of the stack on each pipeline rank; None where pipelines do not interleave, as far as is known."""
        each, stages = self.num_layers_per_virtual_pipeline_stage, self.virtual_pipeline_model_parallel_size
        if each and num_layers is not None:
            stages = num_layers // (max(self.pipeline_model_parallel_size, 1) * each)
        return None if stages == 1 else stages

    @property
    def dtype_name(self) -> Literal["bfloat16", "float16", "float32"]:
        """Of the parameters, as torch calls it."""
        return "float16" if self.fp16 else "float32" if self.fp32 else "bfloat16"
