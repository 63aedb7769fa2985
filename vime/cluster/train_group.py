"""All ranks of one model, as the training loop sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from vime.cluster.actors import ModelActor, TrainActor, trainer_environment
from vime.cluster.calls import wait_all
from vime.config import Config
from vime.naming import rollout_name
from vime.types import RolloutBatch, TokenScores, TrainBatch, TrainResult, WeightVersion

if TYPE_CHECKING:
    from vime.training.offload import Part
    from vime.training.records import Export, StartInfo
    from vime.weights.invitation import Invitation, SendReport
    from vime.weights.plan import WeightPlan

START_TIMEOUT_S = 1800.0  # reading a large checkpoint from a slow disk
STEP_TIMEOUT_S = 6 * 3600.0  # a rank that died is noticed at once; this only ends a hang

Place = Callable[[int], dict[str, Any]]
"""Rank → options for its Ray actor."""

SplitBatch = Callable[[RolloutBatch, int], list[TrainBatch]]
"""(batch, number of data-parallel ranks) → one share for each."""


class TrainGroup:
    """Implements ``ports.Trainer`` with one Ray actor a rank."""

    def __init__(
        self,
        config: Config,
        place: Place,
        threads: int,
        split: SplitBatch,
        actor_class: type[ModelActor] = TrainActor,
    ) -> None:
        self._split = split
        self._name = actor_class.name
        world_size = config.cluster.train_world_size
        actor = ray.remote(actor_class)
        env = {"env_vars": trainer_environment(config, threads)}
        self._ranks = [
            actor.options(runtime_env=env, **place(rank)).remote(config, rank, world_size) for rank in range(world_size)
        ]
        self._infos: list[StartInfo] = []

    async def start(self) -> StartInfo:
        """Builds and loads the model on every rank; returns what the reporting rank says."""
        address, port = (await self._call(self._ranks[:1], "address", what=f"placing the {self._name}"))[0]
        self._infos = await self._call(
            self._ranks, "start", address, port, what=f"starting the {self._name}", timeout_s=START_TIMEOUT_S
        )
        return self._infos[0]

    async def train(self, batch: RolloutBatch) -> TrainResult:
        shares = self._split(batch, self._infos[0].dp_size)
        what = f"training the {self._name} on {rollout_name(batch.rollout_id)}"
        result: TrainResult = self._reported(await self._share("train", shares, what=what))
        return result

    async def score(self, batch: RolloutBatch) -> dict[int, TokenScores]:
        """What the model says of all samples before it learns from them, by their index."""
        shares = self._split(batch, self._infos[0].dp_size)
        what = f"asking the {self._name} about {rollout_name(batch.rollout_id)}"
        results: list[dict[int, TokenScores]] = await self._share("score", shares, what=what)
        return {index: scores for of_rank in results for index, scores in of_rank.items()}

    async def evaluate(self, batch: RolloutBatch, split: SplitBatch) -> dict[str, float]:
        """The loss on given dialogues and what goes with it; see ``SftWorker.evaluate``."""
        shares = split(batch, self._infos[0].dp_size)
        metrics: dict[str, float] = self._reported(await self._share("evaluate", shares, what="evaluating"))
        return metrics

    async def _share(self, method: str, shares: list[TrainBatch], *, what: str) -> list[Any]:
        """Gives each rank the share of its data-parallel rank; the answers by rank.

        Shares may have gigabytes of routes. Ray keeps one copy of each on every node where a rank reads it, until the
        call is over, and makes it beside the loop.
        """
        stored = await asyncio.to_thread(lambda: [ray.put(share) for share in shares])
        calls = [
            getattr(rank, method).remote(stored[info.dp_rank])
            for rank, info in zip(self._ranks, self._infos, strict=True)
        ]
        return await wait_all(calls, what=what, timeout_s=STEP_TIMEOUT_S)

    def _reported(self, results: list[Any]) -> Any:
        """What the reporting rank answered."""
        return next(result for result, info in zip(results, self._infos, strict=True) if info.is_reporter)

    async def export_weights(self, version: WeightVersion, *, on_device: bool = False) -> Export:
        """The current weights, which will be that version, packed in memory that engines on the same machine can read;
        with ``on_device`` on each rank's device, where there is room, until ``drop_copies``."""
        exports: list[Export | None] = await self._call(
            self._ranks, "export_weights", version, on_device, what="exporting the weights"
        )
        return next(export for export in exports if export is not None)

    async def drop_copies(self) -> None:
        """Of the weights, on the devices."""
        await self._call(self._ranks, "drop_copy", what="freeing the copies of the weights")

    async def weight_plan(self, version: WeightVersion) -> WeightPlan:
        """What the sync that begins now will carry as that version."""
        what = "planning the weight sync"
        plans: list[WeightPlan] = await self._call(self._ranks, "weight_plan", version, what=what)
        return plans[0]

    async def invite_engines(self, members: int, timeout_s: float) -> Invitation:
        what = "opening the weight group"
        invitation: Invitation = await self._first("invite_engines", members, timeout_s, what=what)
        return invitation

    async def join_engines(self) -> None:
        await self._first("join_engines", what="waiting for the engines to join the weight group")

    async def broadcast_weights(self, bucket_bytes: int) -> SendReport:
        """One broadcast from the first rank to all engines, gathered from all ranks meanwhile."""
        reports: list[SendReport | None] = await self._call(
            self._ranks, "broadcast_weights", bucket_bytes, what="broadcasting the weights"
        )
        return next(report for report in reports if report is not None)

    async def memory_gib(self) -> float:
        """What the fullest rank holds now."""
        held: list[float] = await self._call(self._ranks, "memory_gib", what="asking the trainer for its memory")
        return max(held)

    async def log_probs_of(self, token_ids: list[int], prompt_length: int) -> list[float]:
        """What the trainer's weights say of the tokens after the prompt, in nats, at the rollout temperature."""
        answers: list[list[float]] = await self._call(
            self._ranks, "log_probs_of", token_ids, prompt_length, what="probing the weights"
        )
        return next((answer for answer in answers if answer), [])

    async def free_bytes(self) -> list[int]:
        """What nobody holds of each rank's device."""
        free: list[int] = await self._call(self._ranks, "free_bytes", what=f"asking the {self._name} for free memory")
        return free

    async def prepare_to_leave(self) -> None:
        """Every rank begins to make the host memory that ``offload`` needs."""
        await self._call(self._ranks, "prepare_to_leave", what=f"preparing the {self._name} to leave its devices")

    async def shed(self) -> list[int]:
        """Every rank drops its gradients, and what it does not use; then what nobody holds of each rank's device."""
        free: list[int] = await self._call(self._ranks, "shed", what=f"freeing the {self._name}'s gradients")
        return free

    async def begin_offload(self, part: Part) -> None:
        """Every rank starts to copy that part of its state to the host."""
        await self._call(self._ranks, "begin_offload", part, what=f"starting to move the {self._name}'s {part}")

    async def offload(self, part: Part) -> None:
        """Every rank frees the device memory of that part of its state; see ``training.offload``."""
        await self._call(self._ranks, "offload", part, what=f"moving the {self._name}'s {part} to the host")

    async def onload(self, part: Part) -> None:
        await self._call(self._ranks, "onload", part, what=f"moving the {self._name}'s {part} to the device")

    async def save(self, directory: Path) -> None:
        await self._call(self._ranks, "save", directory, what=f"saving {directory}")

    async def save_hf(self, directory: Path) -> None:
        await self._call(self._ranks, "save_hf", directory, what=f"saving {directory}")

    async def stop(self) -> None:
        """Lets every rank leave its process group; never raises for one that is gone already."""
        try:
            await self._call(self._ranks, "stop", what=f"stopping the {self._name}", timeout_s=10)
        except Exception:  # the run ends anyway; Ray kills what is left
            return

    async def _first(self, method: str, *arguments: Any, what: str) -> Any:
        """The answer of the first rank alone."""
        (answer,) = await self._call(self._ranks[:1], method, *arguments, what=what)
        return answer

    async def _call(
        self, ranks: list[Any], method: str, *arguments: Any, what: str, timeout_s: float = STEP_TIMEOUT_S
    ) -> list[Any]:
        calls = [getattr(rank, method).remote(*arguments) for rank in ranks]
        return await wait_all(calls, what=what, timeout_s=timeout_s)
