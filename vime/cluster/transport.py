"""Which way the weights take from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Sequence

from vime.errors import UserError

__all__ = ["chosen_transport"]


def chosen_transport(
    asked: str, *, trainer_node: str, engine_nodes: Sequence[str], on_gpus: bool, colocate: bool, lasting: bool = False
) -> str:
    """ "shm", "ipc", "nccl" or "disk", for what --update-weight-transport says.

    By itself: shared memory where trainer and engines run on the CPUs of one machine; memory of the GPUs that they take
    turns on; a process group where engines have GPUs of their own, or another node. A disk only if it was asked for.

    Args:
        trainer_node: of the first rank, from which the weights leave.
        engine_nodes: of each engine.
        lasting: shared memory is to keep the weights, because an engine that is restarted should find them at once, or
            because the trainer stays on the GPUs, which may lack the room for a copy.

    Raises:
        UserError: the placement does not allow what was asked for.
    """
    if asked == "disk":  # a disk may be seen from everywhere
        return asked
    elsewhere = [index for index, node in enumerate(engine_nodes) if node != trainer_node]
    same_gpus = on_gpus and colocate
    if asked == "shm" and elsewhere:
        raise UserError(
            f"--update-weight-transport shm: engine {elsewhere[0]} is not on the node of the trainer's first rank, so "
            "they share no memory; nccl reaches it"
        )
    if same_gpus and elsewhere:
        raise UserError(
            f"--colocate: engine {elsewhere[0]} is on another node than the trainer's first rank, and a process group "
            "cannot have two processes on one GPU; give the engines slots of their own"
        )
    if same_gpus and asked == "nccl":
        raise UserError(
            "--update-weight-transport nccl: a process group cannot have two processes on one GPU, as under --colocate"
        )
    if asked == "ipc" and not same_gpus:
        raise UserError(
            "--update-weight-transport ipc: the engines are not on the trainer's GPUs, which only --colocate gives; "
            "leave it to auto"
        )
    if asked != "auto":
        return asked
    if same_gpus:
        return "shm" if lasting else "ipc"
    return "nccl" if elsewhere or on_gpus else "shm"
