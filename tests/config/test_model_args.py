"""MODEL_ARGS: accepted, and compared with config.json. The files in scripts/ are sourced by bash as a user does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime.config import parse_config, resolve
from vime.config.rules.expected import EXPECTED, agrees
from vime.models.shape import MoeShape

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted((ROOT / "scripts" / "models").glob("*.sh"))

SPARSE = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_topk": 512,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}

RIGHT = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 6 --group-query-attention
    --num-query-groups 2 --kv-channels 32 --vocab-size 512 --swiglu --disable-bias-linear --normalization RMSNorm
    --norm-epsilon 1e-6 --use-rotary-position-embeddings --rotary-base 1000000 --qk-layernorm
"""


def test_flags_that_repeat_config_json_are_right(flags):
    assert resolve(flags(*RIGHT.split())).violations == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers 3", "--num-layers 3 differs from {config}, which says 2"),
        ("--hidden-size 128", "--hidden-size 128 differs from {config}, which says 64"),
        ("--ffn-hidden-size 1", "--ffn-hidden-size 1 differs from {config}, which says 192"),
        ("--num-attention-heads 2", "--num-attention-heads 2 differs from {config}, which says 6"),
        ("--num-query-groups 1", "--num-query-groups 1 differs from {config}, which says 2"),
        ("--kv-channels 64", "--kv-channels 64 differs from {config}, which says 32"),
        ("--norm-epsilon 1e-5", "--norm-epsilon 1e-05 differs from {config}, which says 1e-06"),
        ("--rotary-base 10000", "--rotary-base 10000.0 differs from {config}, which says 1000000.0"),
        ("--no-qk-layernorm", "--qk-layernorm False differs from {config}, which says True"),
        ("--add-qkv-bias", "--add-qkv-bias True differs from {config}, which says False"),
        ("--normalization LayerNorm", "--normalization LayerNorm differs from {config}, which says RMSNorm"),
        (
            "--untie-embeddings-and-output-weights",
            "--untie-embeddings-and-output-weights True differs from {config}, which says False",
        ),
        ("--use-rope-scaling", "--use-rope-scaling True differs from {config}, which says False"),
        ("--add-bias-linear", "--add-bias-linear True differs from {config}, which says False"),
        ("--softmax-type off-by-one", "--softmax-type off-by-one differs from {config}, which says vanilla"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p True differs from {config}, which says False"),
        ("--layernorm-zero-centered-gamma", "--apply-layernorm-1p True differs from {config}, which says False"),
        ("--vocab-size 511", "--vocab-size 511 is less than the 512 of {config}"),
    ],
)
def test_a_mismatch_names_both_values(flags, model_dir, words, message):
    config = model_dir / "config.json"
    assert resolve(flags(*RIGHT.split(), *words.split())).violations == (message.format(config=config),)


@pytest.mark.parametrize("words", ["[0]*3+[1]*2", "([0]*3 + [1]*2)", "[0,0,0,1,1]"])
def test_layers_with_experts_are_listed_as_megatron_lm_does(flags, words):
    assert resolve(flags("--moe-layer-freq", words)).config.megatron["moe_layer_freq"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("words", ["[0]*3+exit()", "[2]", "every"])
def test_other_lists_of_layers_are_refused(flags, words):
    (line, *_) = resolve(flags("--moe-layer-freq", words)).violations
    assert line == f"--moe-layer-freq expects a whole number, or a list like [0]*3+[1]*58, not {words!r}"


def test_each_mismatch_has_its_line(flags):
    assert len(resolve(flags("--num-layers", "3", "--hidden-size", "1", "--kv-channels", "1")).violations) == 3


def test_sparse_attention_is_trained_only_where_it_is_dense(flags, model_dir):
    values = json.loads((model_dir / "config.json").read_text()) | SPARSE
    (model_dir / "config.json").write_text(json.dumps(values))
    (message,) = resolve(flags()).violations
    assert message == (
        "GlmMoeDsaForCausalLM can be trained on up to 512 tokens, its index_topk, and a rollout can have 1024: give "
        "--rollout-max-context-len 512 or less"
    )
    for limit in ("--rollout-max-context-len 512", "--vllm-max-model-len 512", "--rollout-max-prompt-len 448"):
        assert resolve(flags(*limit.split())).violations == ()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "has 8-bit weights, and engines can only be given"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors', weight_block_size=None is not"),
    ],
)
def test_engines_are_not_given_quantised_weights(flags, model_dir, quantization, message):
    values = json.loads((model_dir / "config.json").read_text()) | {"quantization_config": quantization}
    (model_dir / "config.json").write_text(json.dumps(values))
    (violation,) = resolve(flags()).violations
    assert violation.startswith("--hf-checkpoint") and message in violation


def test_yarn_is_not_left_to_transformer_engine(flags, model_dir):
    values = json.loads((model_dir / "config.json").read_text())
    values["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (model_dir / "config.json").write_text(json.dumps(values))
    (message,) = resolve(flags("--transformer-impl", "transformer_engine")).violations
    assert message.startswith("--transformer-impl transformer_engine cannot rotate positions as Qwen3ForCausalLM does")
    assert resolve(flags("--transformer-impl", "local")).violations == ()


def test_a_number_that_went_through_32_bits_is_the_same(flags, model_dir):
    content = json.loads((model_dir / "config.json").read_text()) | {"rms_norm_eps": 9.999999974752427e-07}
    (model_dir / "config.json").write_text(json.dumps(content))
    assert resolve(flags("--norm-epsilon", "1e-6")).violations == ()


def test_a_padded_vocabulary_is_allowed(flags):
    assert parse_config(flags("--vocab-size", "640")).checkpoint.vocab_size == 640


def test_an_unsupported_architecture_is_said_once(flags, model_dir):
    content = json.loads((model_dir / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (model_dir / "config.json").write_text(json.dumps(content))
    (message,) = resolve(flags()).violations
    assert message.startswith("--hf-checkpoint: ") and "MambaForCausalLM" in message


def sourced(script: Path, then: str = ":") -> list[str]:
    command = f'source "{script}"; {then}; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("script", MODELS, ids=lambda path: path.stem)
def test_a_sourced_script_gives_flags_that_parse(flags, script):
    resolution = resolve(flags("--hf-checkpoint", "/nowhere", *sourced(script)))
    assert resolution.violations == (
        "--hf-checkpoint /nowhere: no such folder (it must be a local one; `hf download` makes it)",
    )


@pytest.mark.parametrize(
    ("score_function", "normalize_weights", "right"),
    [("softmax", True, [False]), ("softmax", False, [True]), ("sigmoid", True, [False, True])],
)
def test_softmax_before_the_choice_of_experts_is_the_models_and_nothing_with_sigmoid(
    score_function, normalize_weights, right
):
    moe = MoeShape(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=8,
        dense_layers=frozenset(),
        score_function=score_function,
        normalize_weights=normalize_weights,
    )
    expected = EXPECTED["moe_router_pre_softmax"].of(SimpleNamespace(moe=moe))
    assert [given for given in (False, True) if agrees("moe_router_pre_softmax", given, expected)] == right


def test_values_can_be_overridden_after_sourcing(flags):
    words = sourced(ROOT / "scripts" / "models" / "qwen3-4B.sh", "MODEL_ARGS+=(--rotary-base 10000)")
    assert resolve(flags(*words)).config.megatron["rotary_base"] == 10000.0


def test_qwen3_4b_has_the_published_shape(flags):
    config = resolve(flags(*sourced(ROOT / "scripts" / "models" / "qwen3-4B.sh"))).config
    assert config.checkpoint.vocab_size == 151936
    assert config.megatron == {
        "num_layers": 36,
        "hidden_size": 2560,
        "ffn_hidden_size": 9728,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "rotary_base": 1e6,
        "qk_layernorm": True,
    }


SCRIPTS = {
    "run-qwen3-4B.sh": ("qwen3-4B", 4),
    "run-qwen3-4B-1gpu.sh": ("qwen3-4B", 1),
    "run-qwen3-30B-A3B.sh": ("qwen3-30B-A3B", 2),
}
"""Script → its model, and how many engines share its slots."""


@pytest.mark.parametrize(("script", "model", "engines"), [(name, *rest) for name, rest in SCRIPTS.items()])
def test_a_script_to_run_has_right_flags_for_its_model(tmp_path, script, model, engines):
    """Only files are missing here; the layout is one that the public shape of the model allows."""
    echo = tmp_path / "echo.sh"
    echo.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    echo.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts" / script, "--num-rollout", "2"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(echo), "ROOT": "/data"},
        capture_output=True,
        text=True,
        check=True,
    )
    program, *words = done.stdout.split("\0")[:-1]
    public = json.loads((ROOT / "tests" / "models" / "public_configs" / f"{model}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(public["config"]))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    resolution = resolve([*words, "--hf-checkpoint", str(tmp_path)])
    unexpected = [line for line in resolution.violations if ": no such" not in line]
    assert (Path(program).name, unexpected) == ("train.py", [])
    assert resolution.config.rollout.num_rollout == 2
    assert resolution.config.batch.num_steps_per_rollout == 1
    assert resolution.config.cluster.num_engines == engines
