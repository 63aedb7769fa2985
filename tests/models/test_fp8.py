"""Checkpoints in 8 bits with block scales: read as bfloat16, whole and in parts, exported without quantisation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.plain_megatron import build, parallel_layout
from tests.tiny import make_model
from vime.errors import UserError
from vime.models import load_shape
from vime.models.fp8 import dequantised
from vime.models.hf_folder import HfWeights

BLOCK = (16, 24)  # neither divides the widths of the model


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with parallel_layout():
        yield


def quantise(hf_dir: Path, method: str = "fp8") -> dict[str, torch.Tensor]:
    """Rewrites the projections of a folder in 8 bits; returns what a reader should see, block by block."""
    path = hf_dir / "model.safetensors"
    expected, written = load_file(path), {}
    for name, weight in expected.items():
        if not name.endswith("proj.weight"):
            written[name] = weight
            continue
        blocks = [-(-size // side) for size, side in zip(weight.shape, BLOCK, strict=True)]
        scale, small = torch.empty(blocks), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        seen = torch.empty_like(weight)
        for i in range(blocks[0]):
            for j in range(blocks[1]):
                place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
                scale[i, j] = weight[place].abs().max() / 448  # the largest number of the format
                small[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
                seen[place] = (small[place].float() * scale[i, j]).bfloat16()
        written |= {name: small, f"{name}_scale_inv": scale}
        expected[name] = seen
    save_file(written, path, metadata={"format": "pt"})
    config = json.loads((hf_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (hf_dir / "config.json").write_text(json.dumps(config))
    return expected


def test_a_quantised_model_is_loaded_and_exported_in_bfloat16(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from vime.training.weights_io import load_hf_weights, save_hf

    hf_dir, out = make_model(tmp_path / "hf", "deepseek_v3", dtype="bfloat16"), tmp_path / "out"
    expected = quantise(hf_dir)
    shape = load_shape(hf_dir)
    model = build(shape, "bfloat16")
    load_hf_weights([model], shape, hf_dir)
    save_hf(out, [model], shape, hf_dir)
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in expected.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_what_the_whole_has_there(tmp_path: Path, dim: int) -> None:
    expected = quantise(make_model(tmp_path, dtype="bfloat16"))
    name = "model.layers.0.mlp.gate_proj.weight"  # 128 rows, 64 columns
    with HfWeights(tmp_path) as weights:
        assert not [name for name in weights.names if name.endswith("_scale_inv")]
        assert weights.dtype(name) == "bfloat16"
        for start, stop in ((0, 16), (16, 24), (5, 61), (50, 64)):
            part = weights.read(name, dim, start, stop)
            assert torch.equal(part, expected[name].narrow(dim, start, stop - start))


def test_a_block_is_multiplied_by_its_scale() -> None:
    weight = torch.full((3, 4), 2.0).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    rows = dequantised(weight, scale, (2, 3)).tolist()
    assert rows == [[2, 2, 2, 20], [2, 2, 2, 20], [200, 200, 200, 2000]]


def test_another_quantisation_is_told(tmp_path: Path) -> None:
    quantise(make_model(tmp_path, dtype="bfloat16"), "awq")
    with pytest.raises(UserError, match=r"config\.json: quantization_config with quant_method='awq'"):
        HfWeights(tmp_path)


def test_a_weight_in_8_bits_without_a_scale_is_told(tmp_path: Path) -> None:
    """Numbers of 8 bits mean nothing without what they are multiplied by."""
    quantise(make_model(tmp_path, dtype="bfloat16"))
    name = "model.layers.0.mlp.gate_proj.weight"
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, path, metadata={"format": "pt"})
    said = rf"do not fit its config\.json: tensors in 8 bits without their scales, \*_scale_inv: {name}$"
    with HfWeights(tmp_path) as weights, pytest.raises(UserError, match=said):
        weights.check_model(load_shape(tmp_path))
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}, path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with HfWeights(tmp_path) as weights, pytest.raises(UserError, match=r"8 bits without .* and \d+ more$"):
        weights.check_model(load_shape(tmp_path))
