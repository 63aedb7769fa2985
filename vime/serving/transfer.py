"""What runs inside vLLM's workers: our weight transfer backend "vime".

A worker imports this module because the engine is started with ``--worker-extension-cls``; the import registers the
backend. One update is: announce the plan (checked against the served model before anything is touched), start, one or
more buckets, finish. Finishing proves that the model computes with what was sent.

Written for vLLM 0.32; ``tests/serving`` fails where a later version no longer fits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from vime.models.hf_folder import HfWeights
from vime.platform import current as platform
from vime.platform.cuda_driver import DriverError
from vime.platform.device_memory import device_id, open_device
from vime.serving.guard import die_with_parent
from vime.serving.proof import Proof
from vime.weights.broadcast import Receiver, moved
from vime.weights.expected import ExpectedWeights
from vime.weights.invitation import Invitation
from vime.weights.plan import PlanMismatch, WeightPlan
from vime.weights.shm import open_shared, view

BACKEND = "vime"

_UNCHANGED = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""What may be done with the weights of a layer that takes them as they come."""

logger = logging.getLogger("vllm.vime")  # a child of vLLM's own logger, so that it shows in the engine's log


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The plan of the updates to come, as ``WeightPlan.to_json`` gives it, and how they will come.

    Where ``world_size`` is 0 the trainer shares its memory. Else it broadcasts to a process group, in which this
    engine's processes have the ranks from ``rank_offset`` on; the other fields are those of ``weights.Invitation``.
    """

    plan: list[list[Any]]
    address: str = ""
    port: int = 0
    secret: str = ""
    rank_offset: int = 0
    world_size: int = 0
    timeout_s: float = 0.0

    @property
    def invitation(self) -> Invitation:
        return Invitation(
            address=self.address,
            port=self.port,
            secret=self.secret,
            world_size=self.world_size,
            timeout_s=self.timeout_s,
        )


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where all tensors of the announced plan are: in the Hugging Face folder ``folder``, or at their places in the
    buffer ``path`` or in device memory, whose ``handles`` are given by the name of the device. Nothing there may change
    before the update is finished. With none of them they are being broadcast. A buffer of the host and a broadcast are
    loaded in buckets of at most ``bucket_bytes``.
    """

    digest: str
    bucket_bytes: int = 0
    path: str = ""
    folder: str = ""
    handles: dict[str, str] = field(default_factory=dict)


class Update:
    """One update under way."""

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        self.sent: set[str] = set()
        self.loaded: set[str] = set()  # parameters of the model, by vLLM's names

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Notes what comes by on its way into the model."""
        for name, tensor in tensors:
            self.sent.add(name)
            self.proof.take(name, tensor)
            yield name, tensor


class VimeTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads weights that the trainer shares, broadcasts or has written to a folder."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._plan: WeightPlan | None = None
        self._update: Update | None = None
        self._half_loaded = False
        self._in_place = computes_with_what_it_loads(model, device)
        self._parameters = {name for name, _ in model.named_parameters()}
        self._updates = 0
        self._opened: tuple[str, int, Tensor] | None = None
        self._mapped: Tensor | None = None  # of the trainer's device memory, while it is loaded
        self._receiver: Receiver | None = None
        unlink_shared_memory()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes a plan, and joins the trainer's group unless this process is in it already.

        Raises:
            PlanMismatch: the served model expects another plan.
            PeerLost, WrongBytes: the group did not come about, or does not carry what is sent.
        """
        plan = WeightPlan.from_json(init_info.plan)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        ExpectedWeights.of_folder(Path(self.model_config.model), dtype).check(plan)
        self._plan = plan
        if init_info.world_size:
            self._join(init_info)

    def _join(self, init_info: InitInfo) -> None:
        receiver = self._receiver
        if receiver is not None and receiver.is_open and receiver.invitation == init_info.invitation:
            return
        self._leave()
        rank = init_info.rank_offset + self.parallel_config.rank
        self._receiver = Receiver(init_info.invitation, rank, f"rank {rank} of the weight group, an engine's process")

    def _leave(self, error: BaseException | None = None) -> None:
        if self._receiver is not None:
            self._receiver.close(error)
            self._receiver = None

    def start_weight_update(self) -> None:
        """Touches nothing yet, so that an update which is refused leaves the old weights in place."""
        plan = self._plan
        if plan is None:
            raise RuntimeError("a plan must be announced before a weight update")
        if self._half_loaded:
            self._end_loading()  # an update before was given up; its layers must be whole, with whatever values
        self._update = Update(Proof(self.model, plan.by_name, seed=self._updates))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like the base class's, which waits for an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads what is shared, broadcast or written."""
        try:
            plan = self._plan
            assert plan is not None, "vLLM calls this only after start_weight_update"
            if update_info.digest != plan.digest:
                raise PlanMismatch("the update follows another plan than the announced one")
            if update_info.folder:
                self._load_folder(plan, Path(update_info.folder))
            elif update_info.handles:
                self._load_shared(plan, self._map(update_info.handles, plan.total_bytes), plan.total_bytes)
            elif update_info.path:
                self._load_shared(plan, self._open(update_info.path, plan.total_bytes), update_info.bucket_bytes)
            else:
                self._load_broadcast(plan, update_info.bucket_bytes)
        except BaseException as error:
            self._mapped = None
            self._leave(error)  # a sender that waits for this process hears of it at once
            raise

    def _load_broadcast(self, plan: WeightPlan, bucket_bytes: int) -> None:
        if self._receiver is None:
            raise RuntimeError("weights are broadcast, but this process is in no group")
        for bucket, data in self._receiver.receive(plan, bucket_bytes):
            self._load((spec.name, view(data, moved(spec, bucket))) for spec in bucket)
            del data  # not held while the next is waited for, unless the model keeps views of it

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        update = self._update
        assert update is not None, "vLLM calls this only after start_weight_update"
        if not self._half_loaded:
            if not self._in_place:
                forget_expert_kernels(self.model)
                initialize_layerwise_reload(self.model)
            self._half_loaded = True
        update.loaded |= self.model.load_weights(update.passing(tensors)) or set()

    def _load_shared(self, plan: WeightPlan, data: Tensor, bucket_bytes: int) -> None:
        """From the host each bucket goes to the device as one copy, which each process then cuts; nobody waits for the
        copy here."""
        for first, last in plan.buckets(bucket_bytes):
            bucket = plan.tensors[first:last]
            here = data[bucket[0].offset : bucket[-1].end].to(self.device, non_blocking=True)
            self._load((spec.name, view(here, moved(spec, bucket))) for spec in bucket)

    def _load_folder(self, plan: WeightPlan, folder: Path) -> None:
        with HfWeights(folder) as weights:
            check_folder(plan, weights)
            self._load((spec.name, weights.read(spec.name).to(self.device)) for spec in plan.tensors)

    def _map(self, handles: dict[str, str], size: int) -> Tensor:
        device = device_id()
        if device not in handles:
            raise RuntimeError(f"the trainer has its weights on the devices {', '.join(handles)}, not on {device}")
        try:
            self._mapped = open_device(handles[device], size)
        except DriverError as error:
            raise DriverError(f"{error}; --update-weight-transport shm takes the way through the host") from None
        return self._mapped

    def _open(self, path: str, size: int) -> Tensor:
        """The sender's memory; mapped, and locked for copies to the device, when it is another than the last."""
        if self._opened is None or self._opened[:2] != (path, size):
            if self._opened is not None:
                platform().unpin(self._opened[2])
            data = open_shared(path, size)
            platform().pin(data, read_only=True)
            self._opened = path, size, data
        return self._opened[2]

    def finish_weight_update(self) -> None:
        """Makes the loaded weights those that the model computes with, and proves it.

        Raises:
            PlanMismatch: tensors of the plan were not sent, or parameters of the model not loaded.
            WeightsDidNotArrive: the model computes with something else.
        """
        plan, update = self._plan, self._update
        assert plan is not None and update is not None, "vLLM calls this only after start_weight_update"
        try:
            self._check_complete(plan, update)
            self._end_loading()
            refresh_tied_head(self.model)
            proven = update.proof.check()
        finally:
            self._mapped = None  # the trainer frees it now
        how = "in place" if self._in_place else "layer by layer"
        logger.info("weight update %s: the model computes with what was sent, %d of %d", how, proven, len(update.sent))
        self._update = None
        self._updates += 1

    def _end_loading(self) -> None:
        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
        self._half_loaded = False

    def _check_complete(self, plan: WeightPlan, update: Update) -> None:
        unsent = [spec.name for spec in plan.tensors if spec.name not in update.sent]
        if unsent:
            raise PlanMismatch(f"{len(unsent)} tensors of the plan were not sent, the first is {unsent[0]}")
        unloaded = sorted(self._parameters - update.loaded)
        if unloaded and self.model_config.quantization is None:
            raise PlanMismatch(f"nothing of the plan went into {len(unloaded)} parameters, the first is {unloaded[0]}")

    def shutdown(self) -> None:
        self._plan = self._update = self._mapped = None
        self._leave()


def check_folder(plan: WeightPlan, weights: HfWeights) -> None:
    """Raises PlanMismatch unless the folder has all tensors of the plan; it may have more, such as written copies."""
    folder = weights.hf_dir.name
    for spec in plan.tensors:
        if spec.name not in weights.names:
            raise PlanMismatch(f"{folder} lacks the tensor {spec}")
        shape, dtype = weights.shape(spec.name), weights.dtype(spec.name)
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise PlanMismatch(f"{folder} has {spec.name} as {dtype} {list(shape)}, the plan says {spec}")


def unlink_shared_memory() -> None:
    """Takes the names of the memory through which the processes of a CPU engine talk; vLLM would leave it behind.

    By the time that there is a model every process has mapped it, and it is gone with the last of them.
    """
    for group in (get_tp_group(), get_pp_group()):
        channel: Any = getattr(group.device_communicator, "dist_module", None)
        if hasattr(channel, "group_name"):
            Path(f"/dev/shm/{channel.group_name}_{group.rank_in_group}").unlink(missing_ok=True)


def computes_with_what_it_loads(model: nn.Module, device: torch.device) -> bool:
    """Whether new values can be written over the old ones, because nothing is made of a weight when it is loaded.

    vLLM's reload layer by layer is right for every model, but its bookkeeping takes half a millisecond a tensor: twice
    as long as the transfer of 8 GB between two H200s. Weights of a CPU are packed, latent attention multiplies some of
    its weights into others, and kernels for experts may want them in another order.
    """
    if device.type == "cpu":
        return False
    return all(
        isinstance(getattr(module, "quant_method", None), _UNCHANGED)
        and (type(module) is Attention or not hasattr(module, "process_weights_after_loading"))
        for module in model.modules()
    )


def forget_expert_kernels(model: nn.Module) -> None:
    """Has experts packed anew.

    On a CPU, vLLM packs the weights of experts where it makes their kernel, which it does once. After a layer-wise
    reload the old kernel would take unpacked weights for packed ones, and compute something else without any error.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def refresh_tied_head(model: nn.Module) -> None:
    """Packs the embedding anew for its use as the output layer.

    On a CPU, vLLM keeps a packed copy of a matrix for multiplication. A layer-wise reload repacks every linear layer,
    but an embedding that is also the output layer only gets its values copied, and the packed copy stays as it was: the
    model then goes on with the old output layer, without any error.
    """
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class VimeWorkerExtension:
    """Mixed into vLLM's worker class; it is here for the import of this module."""


die_with_parent()  # vLLM's engine core would live on without its API server
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, VimeTransferEngine)
