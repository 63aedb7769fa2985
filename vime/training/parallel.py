"""The process group of the trainer and Megatron's division of it."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from vime.config import Config
from vime.config.sections.parallel import Parallel
from vime.platform import current
from vime.training.layers.context import ContextPart
from vime.weights.collective import join_store, open_store

__all__ = ["connect", "context_part", "disconnect", "pack_multiple"]


def connect(config: Config, *, rank: int, world_size: int, master_addr: str, master_port: int) -> torch.device:
    """Joins the other ranks and returns the device of this one. Rank 0 listens on ``master_port``.

    Raises:
        torch.distributed.DistStoreError: the others did not come within --distributed-timeout-minutes.
    """
    platform = current()
    platform.prepare_megatron()
    platform.bind_loopback(master_addr)
    device = platform.claim(local_rank=int(os.environ.get("LOCAL_RANK", rank)))
    timeout = datetime.timedelta(minutes=config.cluster.distributed_timeout_minutes)
    meeting = {"timeout_s": timeout.total_seconds()}
    if rank == 0:
        store, _ = open_store(master_addr, master_port, **meeting)
    else:
        store = join_store(master_addr, master_port, **meeting)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=config.cluster.distributed_timeout_minutes,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(parallel.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(parallel.seed)
    return device


def context_part() -> ContextPart | None:
    """This rank's part of each pack; None where ranks do not share packs."""
    group = parallel_state.get_context_parallel_group()
    return ContextPart(group.rank(), group.size(), group) if group.size() > 1 else None


def pack_multiple(parallel: Parallel) -> int:
    """Packs can be cut for sequence and context parallelism when their tokens are a multiple of this."""
    chunks = 2 * parallel.context_parallel_size if parallel.context_parallel_size > 1 else 1
    return chunks * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def disconnect() -> None:
    """Leaves the process group, so that this process could join another one."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
