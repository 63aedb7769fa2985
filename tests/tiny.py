"""Tiny models of the real classes, with random weights, and a tokenizer trained on the spot.

Small enough that a test can train and serve them on one core; ``head_dim`` is 32 because vLLM's CPU attention knows no
smaller one.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
VOCAB_SIZE = 512
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
)


@functools.cache
def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` ids with a ChatML template and one token a digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        f"What is {a} + {b}? The answer is {a + b}. Add these numbers." for a in range(60) for b in range(0, 60, 7)
    ]
    corpus += [
        f"user system assistant {word} one two three" for word in ("solve", "problem", "step", "boxed", "final")
    ] * 9
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def make_model(
    folder: Path | str,
    family: str = "llama",
    *,
    tied: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Writes an HF folder (config, safetensors, tokenizer) of a random model and returns it.

    Args:
        family: one of ``FAMILIES``.
        tied: whether embedding and output layer share their weights.
        dtype: "float32" or "bfloat16".
        overrides: fields of the transformers config to set otherwise, e.g. ``num_hidden_layers=4``.
    """
    import torch
    import transformers

    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    classes |= {"glm": "Glm", "glm4": "Glm4", "glm4_moe": "Glm4Moe", "deepseek_v3": "DeepseekV3"}
    classes |= {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}
    tokenizer = make_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen2":  # has no head_dim of its own
        fields |= {"hidden_size": 128, "head_dim": None}
        del fields["head_dim"]
    if family == "qwen3_moe":  # the first layer is dense
        fields |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]}
        fields |= {"norm_topk_prob": True}
    if family == "glm4_moe":  # the best of two groups of experts, and one that sees every token
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
        fields |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
        fields |= {"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0}
    if family in (
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
    ):  # heads of 16 + 8 channels, values of 12; the best of two groups of experts
        fields |= {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        fields |= {"v_head_dim": 12, "num_key_value_heads": 4, "num_mtp_layers": 0, "first_k_dense_replace": 1}
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
        fields |= {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
        del fields["head_dim"]
        if family != "deepseek_v3":  # every token attends to what an indexer chooses: here all, up to 64
            del fields["num_mtp_layers"]
            fields |= {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16, "max_position_embeddings": 64}
    fields |= overrides
    config = getattr(transformers, classes[family] + "Config")(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, classes[family] + "ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases away from their initial ones and zeros, so that tests see them
                torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
    float32 = {name: buffer.clone() for name, buffer in model.named_buffers() if "e_score_correction_bias" in name}
    model = model.to(getattr(torch, dtype))
    for name, buffer in float32.items():  # as public checkpoints have it
        model.get_buffer(name).data = buffer
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def add_mtp_layer(folder: Path, *, copies: bool = True, seed: int = 2) -> Path:
    """Puts a random layer for multi-token prediction behind the decoder of a folder that ``make_model`` wrote.

    transformers has no such layer. Names and shapes are those of DeepSeek-V3's and GLM-4.5's public folders; its
    ordinary layer is like the last one of the decoder.

    Args:
        copies: whether the folder has embedding and output layer under the layer's name too, as public ones do.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    dtype = tensors["model.norm.weight"].dtype
    generator = torch.Generator().manual_seed(seed)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        around = 1.0 if like.dim() == 1 else 0.0
        return (torch.randn(like.shape, generator=generator) * 0.1 + around).to(like.dtype)

    last, name = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    added = {key.replace(last, name): drawn(tensor) for key, tensor in tensors.items() if key.startswith(last)}
    added |= {f"{name}{key}.weight": drawn(torch.empty(hidden, dtype=dtype)) for key in ("enorm", "hnorm")}
    added[f"{name}shared_head.norm.weight"] = drawn(torch.empty(hidden, dtype=dtype))
    added[f"{name}eh_proj.weight"] = drawn(torch.empty(hidden, 2 * hidden, dtype=dtype))
    if copies:
        embedding = tensors["model.embed_tokens.weight"]
        added[f"{name}embed_tokens.weight"] = embedding.clone()
        added[f"{name}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2))
    return folder
