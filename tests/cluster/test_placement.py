"""What a cluster has room for, and which way the weights take there. No processes."""

from __future__ import annotations

import pytest

from vime.cluster.placement import along_the_devices, check_engines_fit
from vime.cluster.transport import chosen_transport
from vime.errors import UserError


def test_engines_need_their_slots_on_one_node() -> None:
    check_engines_fit(2, 4, [8], "GPU")
    check_engines_fit(2, 4, [4, 5], "GPU")
    with pytest.raises(
        UserError,
        match=r"--rollout-num-gpus-per-engine 4: an engine runs on one node, and the nodes of this cluster \(6, 3 GPU "
        r"slots\) have room for 1 of 2 engines",
    ):
        check_engines_fit(2, 4, [6, 3], "GPU")


def test_ranks_follow_the_devices_of_each_node() -> None:
    places = [("b", "0"), ("a", "10"), ("a", "9"), ("b", "1")]
    assert along_the_devices(places) == [(2, "9"), (1, "10"), (0, "0"), (3, "1")]


def test_devices_may_have_ids_instead_of_numbers() -> None:
    """CUDA_VISIBLE_DEVICES may hold those, and Ray passes them on."""
    places = [("a", "GPU-9c"), ("a", "MIG-11"), ("b", "1"), ("a", "GPU-1f"), ("a", "2")]
    assert along_the_devices(places) == [(4, "2"), (3, "GPU-1f"), (0, "GPU-9c"), (1, "MIG-11"), (2, "1")]


def choose(
    asked: str, engines: str = "a", *, on_gpus: bool = False, colocate: bool = False, lasting: bool = False
) -> str:
    """The trainer is on node a; ``engines`` names the nodes of the engines."""
    return chosen_transport(
        asked, trainer_node="a", engine_nodes=list(engines), on_gpus=on_gpus, colocate=colocate, lasting=lasting
    )


@pytest.mark.parametrize(
    ("engines", "options", "transport"),
    [
        ("aa", {}, "shm"),
        ("aa", {"colocate": True}, "shm"),
        ("a", {"lasting": True}, "shm"),
        ("a", {"on_gpus": True, "colocate": True}, "ipc"),
        ("a", {"on_gpus": True, "colocate": True, "lasting": True}, "shm"),
        ("a", {"on_gpus": True}, "nccl"),
        ("b", {}, "nccl"),
        ("ab", {}, "nccl"),
        ("ab", {"colocate": True}, "nccl"),
    ],
)
def test_the_transport_follows_from_the_placement(engines: str, options: dict[str, bool], transport: str) -> None:
    assert choose("auto", engines, **options) == transport


def test_a_transport_that_was_asked_for_is_used_where_it_can_be() -> None:
    assert choose("nccl") == "nccl"
    assert choose("shm", on_gpus=True) == "shm"
    assert choose("disk", "ab", on_gpus=True, colocate=True) == "disk"
    with pytest.raises(UserError, match="--update-weight-transport shm: engine 1 is not on the node of the trainer's"):
        choose("shm", "ab")
    for options in ({"on_gpus": True}, {"colocate": True}):
        with pytest.raises(UserError, match="--update-weight-transport ipc: the engines are not on the trainer's GPUs"):
            choose("ipc", **options)
    assert choose("ipc", on_gpus=True, colocate=True, lasting=True) == "ipc"
    with pytest.raises(UserError, match="--update-weight-transport nccl: a process group cannot have two processes on"):
        choose("nccl", on_gpus=True, colocate=True)
    with pytest.raises(UserError, match="--colocate: engine 1 is on another node than the trainer's first rank"):
        choose("auto", "ab", on_gpus=True, colocate=True)
