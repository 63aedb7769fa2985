"""The engines and the router in front of them. Everything of vLLM itself is --vllm-*, of the router --router-*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Addresses, deadlines and limits. Every wait has a deadline."""

    vllm_router_ip: str | None = flag(None, help="Address of a router that runs already; one is started otherwise.")
    vllm_router_port: int | None = flag(None, help="Port of the router; a free one otherwise.")
    vllm_server_concurrency: int = flag(512, help="Most requests in flight for each engine.")
    request_timeout_s: float = flag(1800.0, help="Deadline of one generation request, in seconds.")
    engine_start_timeout_s: float = flag(600.0, help="Deadline of the start of an engine, in seconds.")
    rollout_health_check_first_wait: float = flag(
        0.0,
        help="Seconds after the start of an engine, and then one interval, until its health is first looked at. For "
        "models that take long to warm up.",
    )
    rollout_health_check_interval: float = flag(
        30.0, help="Seconds between health checks of an engine, which generate one token, and of the router."
    )
    rollout_health_check_timeout: float = flag(
        30.0,
        help="Seconds without any token until an engine counts as stuck, and is restarted; without an answer, the "
        "router.",
    )
    weight_sync_timeout_s: float = flag(
        600.0,
        help="Deadline of each step of a weight sync on each engine, in seconds. Where weights go over a group, "
        "each wait for one of its members ends after 120 s at the latest.",
    )
    weight_probe_interval: int = flag(
        10, help="Check that the weights arrived after the first sync and every so many; 0: after the first only."
    )
    update_weight_buffer_size: int = flag(
        512 << 20, help="Bytes that a weight sync moves at a time; within a GPU (ipc) it is all at once."
    )
    update_weight_mode: Literal["full", "delta"] = flag("full", help="What a weight sync carries.")
    update_weight_transport: Literal["auto", "shm", "ipc", "nccl", "disk"] = flag(
        "auto",
        help="How weights reach the engines: shared memory of one machine, memory of the GPUs that engines share with "
        "the trainer (ipc), a process group (NCCL between GPUs, gloo between CPUs), or a folder on a disk. auto: shm "
        "on the CPUs of one machine, ipc under --colocate on GPUs (with --use-fault-tolerance or --no-offload-train "
        "shm), else nccl.",
    )
    update_weight_disk_dir: str | None = flag(
        None, help="Folder for versions of the weights that trainer, driver and engines see under the same path."
    )
    update_weight_disk_keep_files: bool = flag(
        False, help="Keep each version there; else it is removed once every engine has the next one."
    )
    check_weight_update_equal: bool = flag(
        False, help="Accepted for old command lines: the arrival of weights is always proven."
    )
    vllm_weight_sync_packed: bool = flag(
        False, help="Accepted for old command lines: weights always travel packed into buffers."
    )
