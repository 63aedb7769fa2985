"""A folder that looks like a model, a file of prompts, and flags that are right as they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 192,
    "max_position_embeddings": 1024,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}

Flags = Callable[..., list[str]]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "1+1?", "label": "2"}\n')
    return path


@pytest.fixture
def flags(model_dir: Path, prompt_file: Path, tmp_path: Path) -> Flags:
    """``flags(extra…)``: a valid command line without warnings, plus the extra words. What comes last wins."""

    def make(*extra: str) -> list[str]:
        words = f"""
            --hf-checkpoint {model_dir} --prompt-data {prompt_file} --label-key label --rm-type math
            --save {tmp_path / "save"} --colocate --actor-num-gpus-per-node 1 --num-rollout 4
            --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 64
        """.split()
        return [*words, *extra]

    return make
