"""One vLLM server process: its flags, its start, its end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config.foreign import command_words
from vime.config.memory import CPU_KV_CACHE_BYTES
from vime.config.vllm_build import is_cpu_build
from vime.errors import UserError
from vime.models import load_shape
from vime.models.routes import RouteShape
from vime.platform.sockets import LOOPBACK
from vime.serving.control import EngineControl
from vime.serving.health import check_generates
from vime.serving.http import EngineError
from vime.serving.process import ReservedPort, ServerProcess

if TYPE_CHECKING:
    from vime.config import Config

POLL_S = 0.2
KEEP_ALIVE_S = 3600
CUDA_QUEUES = 8  # CUDA's own choice
RECORDING_ON_CPUS = {
    "scheduler_cls": "vime.serving.recording.RecordingScheduler",
    "worker_cls": "vime.serving.recording.RecordingWorker",
}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine serves, and how. ``flags`` are vLLM's, by attribute name; they win over defaults of ours
    but not over what vime itself decides (which the configuration refuses by name)."""

    model: Path
    dtype: str = "auto"
    max_model_len: int | None = None  # None: the model's own, or on a CPU as much as the cache can hold
    tensor_parallel_size: int = 1
    cpu: bool = True
    threads: int = 1  # compute threads of each process; for CPUs only
    devices: tuple[str, ...] = ()  # GPUs to use, by their numbers on the node; none: those that this process sees
    trust_remote_code: bool = False  # run Python code in the model's folder
    sleeps: bool = False  # gives its memory to the trainer between rollouts
    routes: bool = False  # tells to which experts tokens were sent
    seed: int = 0  # of requests without one of their own
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise UserError(f"--hf-checkpoint {self.model}: there is no config.json; it must be a Hugging Face folder")
        if self.routes and self.cpu and load_shape(self.model).mla is not None:
            raise UserError(
                "--use-rollout-routing-replay needs the prefix cache of engines, which vLLM 0.32 does not have on CPUs "
                f"for models with latent attention, as in {self.model}"
            )

    @property
    def route_shape(self) -> RouteShape | None:
        """What the routes that it tells look like."""
        return RouteShape.of(load_shape(self.model)) if self.routes else None

    def command(self, host: str, port: int) -> list[str]:
        """The server's command line."""
        owned = {
            "model": self.model,
            "host": host,
            "port": port,
            "seed": self.seed,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_scale_out": True,  # the token-in, token-out endpoint
            "logprobs_mode": "processed_logprobs",  # those of the distribution that was sampled from
            "weight_transfer_config": {"backend": "vime"},
            "worker_extension_cls": "vime.serving.transfer.VimeWorkerExtension",
        }
        if self.sleeps:
            owned["enable_sleep_mode"] = True
        if self.routes:
            owned |= RECORDING_ON_CPUS if self.cpu else {"enable_return_routed_experts": True}
        flags = self._defaults() | dict(self.flags) | owned
        return [sys.executable, "-m", "vime.serving.server", *command_words("vllm", flags)]

    def _defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "api_server_count": 1,
            "disable_uvicorn_access_log": True,
            "disable_log_stats": True,  # more than a quarter of an API server's work
            "trust_remote_code": self.trust_remote_code or None,
        }
        if not self.cpu:
            return defaults
        # A seeded request whose prefill comes in chunks ends vLLM 0.32's CPU engine.
        defaults |= {"enforce_eager": True, "enable_chunked_prefill": False}
        defaults["max_model_len"] = self.max_model_len or "auto"
        if "gpu_memory_utilization" not in self.flags:  # vLLM's default would take most of the machine
            defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        return defaults

    def environment(self) -> dict[str, str]:
        """Environment variables of the server."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # clients and the router keep connections for a while, and fail if the server closes one as they use it
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
            "PYTHONPATH": os.pathsep.join(filter(None, (_package_root(), os.environ.get("PYTHONPATH", "")))),
        }
        if self.routes and not self.cpu:
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # which alone records routes; where it cannot run it says why
        if not self.cpu:
            # whoever sets one queue for a whole run, as is usual, means Megatron
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = str(CUDA_QUEUES)
        if self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.cpu:
            # 0: the worker lives in the engine core's process, which saves 10 s of imports and half a gigabyte
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(self.threads)}
            # threads that spin while they wait make an engine 20 times slower where it shares its cores
            variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
            # vLLM's own binding would leave one core idle, and pin engines to the same ones
            variables["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return variables


class EngineServer:
    """One engine. It ends with this process, however this process ends.

    Args:
        index: number of the engine, for messages and the name of its log.
        restarts: how often it was started before, for the name of its log.
        port: 0 for a free one.
        start_timeout_s: deadline from the start of the process to the first generated token.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        index: int = 0,
        host: str = LOOPBACK,
        port: int = 0,
        log_dir: Path,
        start_timeout_s: float = 600.0,
        restarts: int = 0,
    ) -> None:
        self.name = f"engine {index}"
        self._spec = spec
        self._host = host
        self._port = port
        self._log = log_dir / (f"engine_{index}_restart_{restarts}.log" if restarts else f"engine_{index}.log")
        self._start_timeout_s = start_timeout_s
        self._reserved: ReservedPort | None = None
        self._process: ServerProcess | None = None

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        index: int,
        devices: Sequence[str] = (),
        threads: int,
        log_dir: Path,
        host: str = LOOPBACK,
        restarts: int = 0,
    ) -> EngineServer:
        spec = EngineSpec(
            model=Path(config.checkpoint.hf_checkpoint),
            dtype=config.parallel.dtype_name,
            max_model_len=config.rollout.rollout_max_context_len,
            tensor_parallel_size=config.cluster.rollout_num_gpus_per_engine,
            cpu=is_cpu_build(),
            threads=threads,
            devices=tuple(devices),
            trust_remote_code=config.checkpoint.trust_remote_code,
            sleeps=config.cluster.offload_rollout and not is_cpu_build(),
            routes=config.algorithm.use_rollout_routing_replay,
            seed=config.data.rollout_seed,
            flags=config.vllm,
        )
        timeout_s = config.engine.engine_start_timeout_s
        return cls(spec, index=index, host=host, log_dir=log_dir, start_timeout_s=timeout_s, restarts=restarts)

    @property
    def url(self) -> str:
        """Known once the engine was started."""
        assert self._reserved is not None, "the engine was not started"
        return f"http://{self._host}:{self._reserved.number}"

    @property
    def pid(self) -> int:
        """The process from which all of the engine's processes descend."""
        assert self._process is not None, "the engine was not started"
        return self._process.pid

    def start(self) -> str:
        """Starts the server, waits until it generates, and returns its URL. Not to be called in an event loop.

        Raises:
            UserError: the port is in use.
            EngineError: the server ended, with its last words, or was not ready in time.
        """
        self._reserved = ReservedPort(self._host, self._port, flag=self.name)
        command = self._spec.command(self._host, self._reserved.number)
        self._process = ServerProcess(self.name, command, log=self._log, environment=self._spec.environment())
        try:
            asyncio.run(self._ready())
        except BaseException:
            self.stop()
            raise
        return self.url

    async def _ready(self) -> None:
        control = EngineControl(self.url, self.name)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._is_up(control):  # noqa: ASYNC110  another process sets no event
                    await asyncio.sleep(POLL_S)
                # the first request takes seconds, which would count against somebody's deadline
                await check_generates(control, timeout_s=self._start_timeout_s, routes=self._spec.route_shape)
        except TimeoutError:
            assert self._process is not None
            waited = f"{self._start_timeout_s:g} s"
            raise EngineError(
                f"{self.name} was not ready within {waited}. The end of {self._log}:\n{self._process.tail()}"
            ) from None
        finally:
            await control.close()

    async def _is_up(self, control: EngineControl) -> bool:
        failure = self.failure()
        if failure is not None:
            raise EngineError(failure)
        try:
            await control.health(timeout_s=5)
        except EngineError:
            return False
        return True

    def failure(self) -> str | None:
        """Why the server is gone, or None while it runs."""
        return self._process.failure() if self._process is not None else f"{self.name} was not started"

    def ended(self) -> str:
        """Waits until the server ends; returns its last words."""
        assert self._process is not None, "the engine was not started"
        return self._process.ended()

    def stop(self) -> None:
        """Ends the server and everything below it; harmless when it has ended already."""
        if self._process is not None:
            self._process.stop()
        if self._reserved is not None:
            self._reserved.release()


def _package_root() -> str:
    """The folder from which ``import vime`` works in the server's processes."""
    return str(Path(__file__).resolve().parents[2])
