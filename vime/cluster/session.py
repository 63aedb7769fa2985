"""Joining the Ray cluster that this job was submitted to, or starting one of our own on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.cluster.calls import RemoteError, get_all
from vime.config import Config
from vime.config.memory import crowding, doubt_beside_gpus, shortage
from vime.errors import UserError
from vime.models import load_shape
from vime.observe.gpu_memory import gpu_bytes
from vime.observe.machine import cores, host_bytes, host_limit, installed_bytes

OBJECT_STORE_BYTES = 512 * 2**20  # batches of token ids are small; Ray's default would take 30 % of the memory
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What ``*-num-gpus*`` flags count: GPUs where the cluster has any, else CPU processes."""

    kind: str  # Ray's resource: "GPU" or "CPU"
    total: int
    threads: int  # compute threads for a process that has a slot


@contextmanager
def ray_session(needed: int, store_bytes: int | None) -> Iterator[Slots]:
    """A Ray cluster for the time of the block.

    Under ``ray job submit``, or where RAY_ADDRESS is set, the job joins that cluster and leaves it running. Else a
    local one is started, and ended with the block; on a machine without GPUs it offers as many slots as are needed.

    Args:
        store_bytes: of a local one, for objects; None: Ray chooses. What does not fit goes to disk.

    Raises:
        UserError: the cluster has fewer slots than needed, or cannot be joined.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray 2.60 warns about its coming default
    joins = "RAY_ADDRESS" in os.environ
    cores = psutil.cpu_count() or 1
    if joins:
        _join()
    else:
        ray.init(
            num_cpus=max(cores, needed + 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=store_bytes,
        )
    try:
        yield _slots(needed, cores)
    finally:
        ray.shutdown()


def object_store_bytes(config: Config) -> int | None:
    """What a Ray of our own may have for objects, in bytes; it takes memory only as it fills.

    Routes are gigabytes, so with them it is Ray's choice: 30 % of the memory that is available as it starts, but no
    more than /dev/shm has, and 200 GB at most.
    """
    return None if config.algorithm.use_rollout_routing_replay else OBJECT_STORE_BYTES


def _join() -> None:
    address = os.environ["RAY_ADDRESS"]
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise UserError(
            f"RAY_ADDRESS {address}: this cluster cannot be joined ({str(error).splitlines()[0]}); is it up, and does "
            "this user have its token (~/.ray/auth_token, RAY_AUTH_TOKEN)?"
        ) from None


def _slots(needed: int, cores: int) -> Slots:
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU", 0) > 0 else "CPU"
    total = int(resources.get(kind, 0))
    if total < needed:
        raise UserError(f"the cluster has {total} {kind} slots, this run needs {needed}")
    return Slots(kind=kind, total=total, threads=max(1, cores // needed) if kind == "CPU" else 1)


def check_devices(config: Config, slots: Slots) -> None:
    """Raises a UserError for a flag that only GPUs can follow, where there are none."""
    if slots.kind == "CPU" and config.megatron.get("gradient_accumulation_fusion"):
        raise UserError(
            "--gradient-accumulation-fusion needs GPUs and there are none; without it, it is on where it can be"
        )


def check_room(config: Config, slots: Slots, say: Callable[[str], None]) -> None:
    """Raises a UserError for a run whose weights and optimizer alone do not fit, as far as that can be told, and says
    where cores are fewer than ranks, or where memory seems too small for what is kept beside GPUs.

    The GPUs of all nodes are taken for those of this one, if it has any. The memory of several nodes is not judged.
    """
    shape, on_gpus = load_shape(config.checkpoint.hf_checkpoint), slots.kind == "GPU"
    of_this_node = gpu_bytes("total") if on_gpus else []
    gpus = of_this_node or gpu_bytes_of_nodes() if on_gpus else []
    if on_gpus and not gpus:
        say("warning: no node says how much memory its GPUs have (nvidia-smi): whether the run fits was not checked")
    alone = sum(1 for node in ray.nodes() if node["Alive"]) == 1 and bool(of_this_node or not on_gpus)
    host = host_limit() if on_gpus else host_bytes()
    told = shortage(config, shape, gpu_bytes=min(gpus) if gpus else None, host_bytes=host if alone else None)
    if told is not None:
        raise UserError(told)
    doubt = doubt_beside_gpus(config, shape, installed_bytes()) if on_gpus else crowding(config, cores())
    if alone and doubt is not None:
        say(f"warning: {doubt}")


def gpu_bytes_of_nodes() -> list[int]:
    """The memory of each GPU of the cluster, as its nodes tell it; empty where they do not."""
    ask = ray.remote(num_cpus=0)(gpu_bytes)
    calls = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote("total")
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU")
    ]
    try:
        answers = get_all(calls, what="asking for the memory of GPUs", timeout_s=ANSWER_TIMEOUT_S)
    except RemoteError:
        return []  # whatever is wrong with a node is told by what the run starts there
    return [size for sizes in answers for size in sizes]
