"""A checkpoint is actor and critic together, wherever the critic is. The models are fakes that write a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vime.checkpoints import CRITIC, CheckpointStore
from vime.cluster.checkpoints import CriticCheckpoints, GroupCheckpoints
from vime.cluster.critic import FIRST_ROLLOUT, first_rollout


class Model:
    """Writes which rollout it has seen; fails where it is told to."""

    def __init__(self, name: str) -> None:
        self.name, self.rollout_id, self.fails = name, 0, False

    async def save(self, directory: Path) -> None:
        if self.fails:
            raise OSError("the disk is full")
        (directory / self.name).write_text(str(self.rollout_id))


def checkpoints(tmp_path: Path, actor: Model, critic: Model, own_root: bool) -> GroupCheckpoints:
    store = CheckpointStore(tmp_path / "critic") if own_root else None
    state: Any = lambda rollout_id: {"cursor": rollout_id}  # noqa: E731
    of_critic = CriticCheckpoints(critic, store)
    return GroupCheckpoints(CheckpointStore(tmp_path / "actor"), actor, state, None, of_critic)  # type: ignore[arg-type]


async def save(checkpoints: GroupCheckpoints, rollout_id: int, *models: Model) -> Path:
    for model in models:
        model.rollout_id = rollout_id
    return await checkpoints.save(rollout_id)


async def test_the_critic_is_a_folder_of_the_checkpoint(tmp_path: Path) -> None:
    actor, critic = Model("actor"), Model("critic")
    folder = await save(checkpoints(tmp_path, actor, critic, own_root=False), 3, actor, critic)
    assert (folder / "actor").read_text() == (folder / CRITIC / "critic").read_text() == "3"
    point = CheckpointStore(tmp_path / "actor").resolve()
    assert point is not None
    assert point.state == {"cursor": 3}


async def test_with_a_root_of_its_own_the_checkpoint_names_it(tmp_path: Path) -> None:
    actor, critic = Model("actor"), Model("critic")
    both = checkpoints(tmp_path, actor, critic, own_root=True)
    names = []
    for _ in range(2):  # saved again, it is another one
        await save(both, 3, actor, critic)
        point, own = (CheckpointStore(tmp_path / name).resolve() for name in ("actor", "critic"))
        assert point is not None and point.state is not None and own is not None and own.state is not None
        assert point.state[CRITIC] == {"root": str(tmp_path / "critic"), "id": own.state["id"]}
        names.append(own.state["id"])
    assert names[0] != names[1]


@pytest.mark.parametrize("own_root", [False, True])
@pytest.mark.parametrize("who", ["actor", "critic"])
async def test_a_failure_in_between_leaves_the_checkpoint_before(tmp_path: Path, own_root: bool, who: str) -> None:
    actor, critic = Model("actor"), Model("critic")
    both = checkpoints(tmp_path, actor, critic, own_root)
    await save(both, 1, actor, critic)
    {"actor": actor, "critic": critic}[who].fails = True
    with pytest.raises(OSError, match="the disk is full"):
        await save(both, 2, actor, critic)
    point = CheckpointStore(tmp_path / "actor").resolve()
    assert point is not None and point.state is not None
    assert point.iteration == 1
    half = [path for name in ("actor", "critic") for path in (tmp_path / name).glob(".iter_*")]
    assert half == [], "it would take room that is scarce"
    if own_root:
        own = CheckpointStore(tmp_path / "critic").resolve(point.iteration)
        assert own is not None and own.state is not None
        assert own.state["id"] == point.state[CRITIC]["id"]


@pytest.mark.parametrize(
    ("start", "resumed", "first"),
    [
        (0, None, 0),
        (100, None, 100),  # the actor goes on from a run without a critic
        (105, {FIRST_ROLLOUT: 100}, 100),
        (5, {}, 0),
    ],
)
def test_rollouts_of_a_critic_count_from_its_own_first(start: int, resumed: dict[str, Any] | None, first: int) -> None:
    assert first_rollout(start, resumed) == first
