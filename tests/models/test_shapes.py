"""config.json → the model's shape, compared with what transformers itself makes of the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import FAMILIES, make_model
from vime.errors import UserError
from vime.models import MlaShape, ModelShape, MoeShape, YarnScaling, load_shape, weight_map
from vime.models.family import is_carried

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 48, "dense_layers": frozenset({0})}
MOE = {
    "qwen3_moe": MoeShape(**EXPERTS),
    "glm4_moe": MoeShape(
        **EXPERTS,
        shared_ffn_hidden_size=48,
        score_function="sigmoid",
        scaling_factor=1.5,
        expert_bias=True,
        num_groups=2,
        top_k_groups=1,
    ),
    "deepseek_v3": MoeShape(
        **EXPERTS,
        shared_ffn_hidden_size=48,
        score_function="sigmoid",
        scaling_factor=2.5,
        expert_bias=True,
        num_groups=2,
        top_k_groups=1,
    ),
}
MOE |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), MOE["deepseek_v3"])
MLA = dict.fromkeys(
    ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    MlaShape(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
)


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_shape_agrees_with_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    from transformers import AutoConfig

    shape = load_shape(make_model(tmp_path, family, tied=tied, dtype="bfloat16"))
    config = AutoConfig.from_pretrained(tmp_path)
    assert shape == ModelShape(
        architecture=config.architectures[0],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=MLA[family].qk_head_dim if family in MLA else 32,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=10000.0,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=tied,
        qk_layernorm=family in ("qwen3", "qwen3_moe", "glm4_moe", *MLA),
        add_qkv_bias=family in ("qwen2", "glm", "glm4", "glm4_moe"),
        rotary_percent=0.5 if family in ("glm", "glm4", "glm4_moe") else 1.0,
        rotary_interleaved=family in ("glm", "glm4", *MLA),
        post_norms=family == "glm4",
        moe=MOE.get(family),
        mla=MLA.get(family),
        longest_exact_context=64 if family in ("deepseek_v32", "glm_moe_dsa") else None,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_weight_map_names_every_tensor_of_transformers_with_its_shape(
    tmp_path: Path, family: str, tied: bool
) -> None:
    from safetensors import safe_open

    shape = load_shape(make_model(tmp_path, family, tied=tied))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    trained = {name: sizes for name, sizes in written.items() if not is_carried(shape, name)}
    assert {tensor.name: tensor.shape for rule in weight_map(shape) for tensor in rule.hf} == trained
    assert (trained != written) is (family in ("deepseek_v32", "glm_moe_dsa"))
    assert all(".indexer." in name for name in written.keys() - trained.keys())


def test_llama_3_2_1b(tmp_path: Path) -> None:
    shape = load_shape(write(tmp_path, LLAMA))
    assert shape.rope_scaling is not None and shape.rope_scaling.factor == 32.0
    assert shape.gpt_fields() == {
        "max_sequence_length": 131072,
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "rotary_percent": 1.0,
        "rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "share_embeddings_and_output_weights": True,
    }
    fields = shape.transformer_fields()
    assert (fields["num_query_groups"], fields["kv_channels"], fields["layernorm_epsilon"]) == (8, 64, 1e-5)


def test_rope_parameters_of_transformers_5_mean_the_same(tmp_path: Path) -> None:
    old = load_shape(write(tmp_path, LLAMA))
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert load_shape(write(tmp_path, new)) == old


def test_yarn_of_deepseek_v3(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"original_max_position_embeddings": 4096}
    scaling = load_shape(write(tmp_path, LLAMA | {"rope_scaling": yarn})).rope_scaling
    assert scaling == YarnScaling(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    )  # fmt: skip
    assert scaling.attention_factor == 1.0
    assert scaling.softmax_factor == pytest.approx(1.8738, abs=1e-4)  # (0.1 ln 40 + 1)²


def test_without_a_factor_yarn_reaches_from_the_original_context_to_the_longest(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    scaling = load_shape(write(tmp_path, LLAMA | {"rope_scaling": yarn})).rope_scaling
    assert scaling == YarnScaling(factor=16.0, original_max_position_embeddings=8192)
    assert scaling.attention_factor == pytest.approx(1.2773, abs=1e-4)  # 0.1 ln 16 + 1


@pytest.mark.parametrize("where", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_partial_rotation_stands_in_either_place(tmp_path: Path, where: dict[str, Any]) -> None:
    shape = load_shape(write(tmp_path, LLAMA | {"rope_scaling": None} | where))
    assert (shape.rotary_percent, shape.rotary_width, shape.gpt_fields()["rotary_percent"]) == (0.5, 32, 0.5)


@pytest.mark.parametrize(
    ("scaling", "can"),
    [
        (None, True),
        (LLAMA["rope_scaling"], True),
        (LLAMA["rope_scaling"] | {"high_freq_factor": 8.0}, False),
        ({"rope_type": "yarn", "factor": 4.0}, False),
    ],
)
def test_what_megatron_can_rotate_by_itself(tmp_path: Path, scaling: dict[str, Any] | None, can: bool) -> None:
    assert load_shape(write(tmp_path, LLAMA | {"rope_scaling": scaling})).rotary_by_megatron is can


def test_qwen3_4b_has_heads_wider_than_its_hidden_size(tmp_path: Path) -> None:
    config = LLAMA | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936,
        "num_hidden_layers": 36, "head_dim": 128, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    shape = load_shape(write(tmp_path, config))
    qkv = next(rule for rule in weight_map(shape) if "linear_qkv" in rule.megatron)
    assert [tensor.shape for tensor in qkv.hf] == [(4096, 2560), (1024, 2560), (1024, 2560)]
    assert shape.rotary_base == 1000000.0


@pytest.mark.parametrize(
    ("vocab_size", "tp", "divisible_by", "padded"),
    [(512, 1, 1, 512), (151936, 2, 1, 151936), (99, 2, 1, 100), (32001, 4, 128, 32256)],
)
def test_vocabulary_is_padded_to_what_the_ranks_share(vocab_size: int, tp: int, divisible_by: int, padded: int) -> None:
    shape = ModelShape(
        architecture="LlamaForCausalLM", vocab_size=vocab_size, num_layers=1, hidden_size=8, ffn_hidden_size=8,
        num_attention_heads=1, num_query_groups=1, kv_channels=8, norm_epsilon=1e-5, rotary_base=1e4,
        max_position_embeddings=8,
    )  # fmt: skip
    assert shape.padded_vocab_size(tp, divisible_by) == padded


@pytest.mark.parametrize("key", ["n_routed_experts", "first_k_dense_replace", "num_nextn_predict_layers"])
def test_a_number_of_things_that_would_not_end_is_refused(tmp_path: Path, key: str) -> None:
    config = json.loads((make_model(tmp_path / "model", "deepseek_v3") / "config.json").read_text())
    with pytest.raises(UserError, match=rf"config.json: '{key}' is 1000000000; no model has more than"):
        load_shape(write(tmp_path, config | {key: 10**9}))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Qwen3-4B: no such folder"):
        load_shape(tmp_path / "Qwen3-4B")


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json in it"):
        load_shape(tmp_path)


@pytest.mark.parametrize("text", ['{"architectures": [', '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    from vime.models.fp8 import block_of
    from vime.models.remote_code import tokenizer_code

    (tmp_path / "config.json").write_text(text)
    for read in (load_shape, block_of):
        with pytest.raises(UserError, match=r"config.json: not valid JSON"):
            read(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "tokenizer_config.json")
    assert tokenizer_code(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; these are: .*LlamaForCausalLM, .*Qwen2",
        ),
        ({"architectures": []}, "must name exactly one architecture"),
        ({"architectures": 5}, "must name exactly one architecture"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; no model has more than 2000"),
        ({"hidden_size": 10**400}, r"'hidden_size' is 1000\d+…; no model has more than 2147483647"),
        ({"rms_norm_eps": 10**400}, r"'rms_norm_eps' must be a positive number, not 1000\d+…"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a positive number, not nan"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object, not [1]"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": "16"}, "'num_hidden_layers' must be a positive integer, not '16'"),
        ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 key/value heads evenly"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type='dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
    ],
)
def test_what_is_not_supported_is_said_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"config\.json: .*" + message.replace("[", r"\[")):
        load_shape(write(tmp_path, LLAMA | change))


def test_reading_shapes_needs_neither_torch_nor_megatron_nor_transformers() -> None:
    code = "import sys, vime.models; print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
