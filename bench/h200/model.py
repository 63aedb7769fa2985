"""A model folder of a public shape with random weights, made where it is measured."""

from __future__ import annotations

import json
from pathlib import Path

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
SMALL: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes of any of these families for a machine without GPUs."""


def describe_model(folder: Path, config: dict[str, object]) -> Path:
    """config.json and a tokenizer that knows one word, without weights."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def make_folder(folder: Path, config: dict[str, object] = QWEN3_4B, *, seed: int = 0) -> Path:
    """A described model with random bf16 weights of standard deviation 0.02 (norms are 1)."""
    import torch
    from safetensors.torch import save_file

    from vime.models import load_shape, weight_map

    describe_model(folder, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    tensors = {}
    for rule in weight_map(load_shape(folder)):
        for tensor in rule.hf:
            norm = len(tensor.shape) == 1
            made = torch.ones(tensor.shape, device=device) if norm else torch.randn(tensor.shape, device=device) * 0.02
            tensors[tensor.name] = made.bfloat16().cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
