"""A Megatron model of stock layers on one process or more, for tests of weights and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vime.models import ModelShape
from vime.platform.sockets import free_port


@contextmanager
def parallel_layout(
    *, rank: int = 0, world: int = 1, port: int = 0, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1
) -> Iterator[None]:
    """Process groups and Megatron's parallel state, taken down at the end."""
    from vime.platform import current

    platform = current()
    platform.bind_loopback("127.0.0.1")
    platform.prepare_megatron()
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0) if world > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(shape: ModelShape, dtype: str = "float32", *, divisible_by: int = 1) -> Any:
    """A GPTModel of this rank with random weights, of Megatron's own layers where it has such ones."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    from vime.platform.megatron_moe import define_missing_gemm

    define_missing_gemm()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    params_dtype = getattr(torch, dtype)
    config = TransformerConfig(
        **shape.transformer_fields(),
        params_dtype=params_dtype,
        bf16=dtype == "bfloat16",
        pipeline_dtype=params_dtype,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
    )
    if shape.post_norms or shape.mla:  # Megatron has no such layer
        from vime.training.layers.spec import Modules, decoder_spec

        spec = decoder_spec(shape, config, Modules())
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.padded_vocab_size(tp, divisible_by),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **shape.gpt_fields(),
    )
    model.to(params_dtype)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return model


def run_ranks(script: str, world: int, *, timeout_s: float = 120, **variables: str) -> None:
    """Runs a script in ``world`` processes with RANK, WORLD and PORT set; fails with the output of the ranks."""
    import subprocess
    import sys

    port = str(free_port())
    environment = os.environ | {"PORT": port, "WORLD": str(world), "OMP_NUM_THREADS": "1"} | variables
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(output[-3000:] for output in outputs)
