"""The patches that let Megatron run without CUDA: still needed, and not felt outside Megatron."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vime.platform import current
from vime.platform.megatron_adam import SITES as ADAM_SITES
from vime.platform.megatron_lists import SITES as LIST_SITES
from vime.platform.megatron_moe import SITES as MOE_SITES
from vime.platform.megatron_objects import SITES as OBJECT_SITES
from vime.platform.megatron_on_cpu import PATCHES, Site, apply_patches
from vime.platform.megatron_wgrad import SITES as PRODUCT_SITES

ALL_SITES = [
    *ADAM_SITES,
    *LIST_SITES,
    *MOE_SITES,
    *OBJECT_SITES,
    *PRODUCT_SITES,
    *(site for patch in PATCHES for site in patch.sites),
]


def megatron_core() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize("site", ALL_SITES, ids=lambda site: f"{site.file}:{site.line}")
def test_upstream_still_has_the_line_that_a_patch_is_for(site: Site) -> None:
    """When this fails, Megatron has changed: see whether the patch is still needed, then move or remove its site."""
    line = (megatron_core() / site.file).read_text().splitlines()[site.line - 1]
    assert site.text in line


def test_every_patch_names_a_reason_and_a_place() -> None:
    assert all(patch.reason and patch.sites for patch in PATCHES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without CUDA")
def test_without_the_patches_megatron_asks_for_cuda() -> None:
    script = (
        "from megatron.core.optimizer.clip_grads import get_grad_norm_fp32\n"
        "import torch\n"
        "get_grad_norm_fp32([torch.ones(3)])\n"
    )
    failed = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert "Torch not compiled with CUDA enabled" in failed.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without CUDA")
def test_the_factories_of_torch_are_left_alone_because_transformers_looks_at_them() -> None:
    before = torch.empty
    apply_patches()
    assert torch.empty is before
    assert "CUDA" in _error_of(lambda: torch.zeros(1, device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without CUDA")
def test_only_megatron_is_told_that_tensors_are_on_cuda() -> None:
    apply_patches()
    weight = torch.ones(1, dtype=torch.bfloat16)
    assert weight.type() == "torch.BFloat16Tensor"
    scope = {"__name__": "megatron.core.optimizer", "weight": weight}
    assert eval("weight.type()", scope) == "torch.cuda.BFloat16Tensor"


def _error_of(action: object) -> str:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        action()  # type: ignore[operator]
    return str(caught.value)


def test_memory_is_told_in_gib() -> None:
    memory = current().memory_gib()
    assert 0 < memory["allocated"] <= memory["peak"] < 1000
