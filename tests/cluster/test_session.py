"""Flags that the slots of the cluster cannot follow are refused before any process starts; what objects may take."""

from pathlib import Path

import pytest

from tests.tiny import make_model
from tests.training.harness import config_of
from vime.cluster.session import OBJECT_STORE_BYTES, Slots, check_devices, object_store_bytes
from vime.errors import UserError


def slots(kind: str) -> Slots:
    return Slots(kind=kind, total=1, threads=1)


def test_accumulating_products_need_a_gpu(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    asked = config_of(model, "--gradient-accumulation-fusion")
    with pytest.raises(UserError, match=r"^--gradient-accumulation-fusion needs GPUs and there are none"):
        check_devices(asked, slots("CPU"))
    check_devices(asked, slots("GPU"))
    check_devices(config_of(model), slots("CPU"))
    check_devices(config_of(model, "--no-gradient-accumulation-fusion"), slots("CPU"))


def test_batches_with_routes_have_the_room_that_ray_would_choose(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe")
    assert object_store_bytes(config_of(model)) == OBJECT_STORE_BYTES
    assert object_store_bytes(config_of(model, "--use-rollout-routing-replay")) is None
