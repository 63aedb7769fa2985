"""The Ray actors: thin shells around plain classes, which know nothing of Ray."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vime.cluster.addresses import node_address
from vime.config import Config
from vime.types import TokenScores, TrainBatch, TrainResult, WeightVersion

if TYPE_CHECKING:
    from vime.training.critic import CriticWorker
    from vime.training.model_worker import ModelWorker
    from vime.training.offload import Part
    from vime.training.records import Export, StartInfo
    from vime.training.sft import SftWorker
    from vime.training.worker import TrainWorker
    from vime.weights.invitation import Invitation, SendReport
    from vime.weights.plan import WeightPlan


class ModelActor(ABC):
    """One Megatron rank of a model that learns."""

    name: ClassVar[str]  # of the model, for people
    _worker: ModelWorker[Any]

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size

    @abstractmethod
    def _worker_class(self) -> type[ModelWorker[Any]]:
        """Imported by the process that needs it."""

    def address(self) -> tuple[str, int]:
        """An address of this node and a free port there, for the ranks to meet."""
        from vime.platform.sockets import free_port

        address = node_address()
        return address, free_port(address)

    def start(self, master_addr: str, master_port: int) -> StartInfo:
        self._worker = self._worker_class()(
            self._config,
            rank=self._rank,
            world_size=self._world_size,
            master_addr=master_addr,
            master_port=master_port,
        )
        return self._worker.start()

    def score(self, batch: TrainBatch) -> dict[int, TokenScores]:
        return self._worker.score(batch)

    def train(self, batch: TrainBatch) -> TrainResult:
        return self._worker.train(batch)

    def prepare_to_leave(self) -> None:
        self._worker.prepare_to_leave()

    def shed(self) -> int:
        return self._worker.shed()

    def begin_offload(self, part: Part) -> None:
        self._worker.begin_offload(part)

    def offload(self, part: Part) -> None:
        self._worker.offload(part)

    def onload(self, part: Part) -> None:
        self._worker.onload(part)

    def free_bytes(self) -> int:
        return self._worker.free_bytes()

    def save(self, directory: Path) -> None:
        self._worker.save(directory)

    def stop(self) -> None:
        self._worker.stop()


class TrainActor(ModelActor):
    """One Megatron rank of the policy that learns."""

    name = "trainer"
    _worker: TrainWorker

    def export_weights(self, version: WeightVersion, on_device: bool) -> Export | None:
        return self._worker.export_weights(version, on_device=on_device)

    def drop_copy(self) -> None:
        self._worker.drop_copy()

    def weight_plan(self, version: WeightVersion) -> WeightPlan:
        return self._worker.weight_plan(version)

    def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        return self._worker.invite_engines(node_address(), members, timeout_s)

    def join_engines(self) -> None:
        self._worker.join_engines()

    def broadcast_weights(self, bucket_bytes: int) -> SendReport | None:
        return self._worker.broadcast_weights(bucket_bytes)

    def memory_gib(self) -> float:
        return self._worker.memory_gib()

    def log_probs_of(self, token_ids: list[int], prompt_length: int) -> list[float]:
        return self._worker.log_probs_of(token_ids, prompt_length)

    def save_hf(self, directory: Path) -> None:
        self._worker.save_hf(directory)

    def _worker_class(self) -> type[TrainWorker]:
        from vime.training.worker import TrainWorker

        return TrainWorker


class SftActor(TrainActor):
    """One Megatron rank that learns given dialogues."""

    _worker: SftWorker

    def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        return self._worker.evaluate(batch)

    def _worker_class(self) -> type[SftWorker]:
        from vime.training.sft import SftWorker

        return SftWorker


class CriticActor(ModelActor):
    """One Megatron rank of the critic."""

    name = "critic"

    def _worker_class(self) -> type[CriticWorker]:
        from vime.training.critic import CriticWorker

        return CriticWorker


class EngineActor:
    """One vLLM server process, on the node where this actor runs; it ends with the actor.

    Args:
        restarts: how often the engine was started before; each time has a log of its own.
    """

    def __init__(
        self, config: Config, index: int, devices: Sequence[str], threads: int, log_dir: Path, restarts: int = 0
    ) -> None:
        from vime.serving.engine import EngineServer

        self._devices = devices
        self._server = EngineServer.from_config(
            config,
            index=index,
            devices=devices,
            threads=threads,
            log_dir=log_dir,
            host=node_address(),
            restarts=restarts,
        )

    def start(self) -> str:
        """Returns the server's URL once it is healthy."""
        return self._server.start()

    def memory_gib(self) -> dict[str, float]:
        """``device``: used on this engine's fullest GPU by all processes; or ``engine``: held by the server's own."""
        from vime.cluster.memory import tree_bytes
        from vime.observe.gpu_memory import gpu_bytes

        devices = self._devices or [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        used = gpu_bytes("used", devices) if devices else []
        held = max(used) if used else tree_bytes(self._server.pid)
        return {"device" if used else "engine": (held or 0) / 2**30}

    def failure(self) -> str | None:
        """Why the server is gone, or None while it runs."""
        return self._server.failure()

    def ended(self) -> str:
        """Waits until the server ends; returns its last words. To be called once it was started."""
        return self._server.ended()

    def stop(self) -> None:
        self._server.stop()


def trainer_environment(config: Config, threads: int) -> dict[str, str]:
    """The environment of a rank; --train-env-vars win.

    Where ranks share matrices, Megatron hands a communication to the device before the product that is to run beside
    it, and relies on one queue to keep that order (tensor_parallel/layers.py:545). One queue makes copies wait for
    products, so others do not get it.
    """
    shares_matrices = config.parallel.tensor_model_parallel_size > 1
    ordered = {"CUDA_DEVICE_MAX_CONNECTIONS": 1} if shares_matrices else {}
    return environment(threads, {**ordered, **config.cluster.train_env_vars})


def environment(threads: int, extra: dict[str, Any] | None = None) -> dict[str, str]:
    """The environment of an actor. Ray sets one compute thread unless told otherwise.

    Compute threads sleep while they wait: trainer and engine share cores, and threads that spin would take them away
    from whoever has work.
    """
    variables = {
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": 1,
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }
    return {name: str(value) for name, value in variables.items()}
