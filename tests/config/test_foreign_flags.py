"""Flags of Megatron, vLLM and the router: passed through, checked by kind, or refused with what to use instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.config import parse_config, resolve
from vime.config.foreign import command_words, manifest
from vime.config.foreign.megatron_lm import ALIASES
from vime.config.foreign.owned import OWNED
from vime.config.kinds import human_int

ROOT = Path(__file__).resolve().parents[2]


def test_only_what_the_user_gave_is_kept(flags):
    config = parse_config(flags())
    assert (dict(config.vllm), dict(config.router), dict(config.megatron)) == ({}, {}, {})


def test_vllm_flags_have_a_prefix_and_keep_their_kind(flags):
    words = "--vllm-gpu-memory-utilization 0.7 --vllm-max-num-seqs 8 --vllm-dtype bfloat16 --vllm-enforce-eager"
    assert parse_config(flags(*words.split())).vllm == {
        "gpu_memory_utilization": 0.7,
        "max_num_seqs": 8,
        "dtype": "bfloat16",
        "enforce_eager": True,
    }


@pytest.mark.parametrize(
    ("word", "value"), [("4k", "4k"), ("4K", "4K"), ("1.5m", "1.5m"), ("auto", "auto"), ("256", 256)]
)
def test_vllm_sizes_with_suffixes_stay_as_written(flags, word, value):
    assert parse_config(flags("--vllm-max-model-len", word)).vllm["max_model_len"] == value


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25600),
        ("1M", 1 << 20),
        (256, 256),
        ("auto", None),
        (-1, None),
        (None, None),
    ],
)
def test_the_number_behind_a_size(written, number):
    assert human_int(written) == number


@pytest.mark.parametrize("word", ["--no-vllm-enable-prefix-caching", "--vllm-no-enable-prefix-caching"])
def test_vllm_switches_can_be_turned_off(flags, word):
    assert parse_config(flags(word)).vllm == {"enable_prefix_caching": False}


def test_router_flags_have_a_prefix(flags):
    words = ["--router-policy", "round_robin", "--router-balance-abs-threshold", "0"]
    assert parse_config(flags(*words)).router == {"policy": "round_robin", "balance_abs_threshold": 0}


def test_our_own_flags_come_before_those_of_the_same_prefix(flags):
    config = parse_config(flags("--vllm-router-ip", "127.0.0.1", "--vllm-router-port", "8000"))
    assert (config.engine.vllm_router_port, dict(config.vllm)) == (8000, {})


def test_what_was_given_becomes_vllms_own_command_line(flags):
    speculative = '{"method": "ngram", "num_speculative_tokens": 3}'
    words = "--vllm-max-model-len 4k --no-vllm-enable-prefix-caching --vllm-enforce-eager"
    sizes = ("--vllm-cudagraph-capture-sizes", "1", "2")
    config = parse_config(flags(*words.split(), *sizes, "--vllm-speculative-config", speculative))
    assert list(command_words("vllm", config.vllm)) == [
        *("--max-model-len", "4k", "--no-enable-prefix-caching", "--enforce-eager"),
        *("--cudagraph-capture-sizes", "1", "2", "--speculative-config", speculative),
    ]


def test_repeatable_flags_become_repeated_ones(flags):
    config = parse_config(flags("--vllm-middleware", "a.b", "--vllm-middleware", "c.d"))
    assert list(command_words("vllm", config.vllm)) == ["--middleware", "a.b", "--middleware", "c.d"]


def test_a_switch_without_a_negation_is_left_out_when_it_is_off():
    assert list(command_words("vllm", {"disable_log_stats": False})) == []


def test_megatron_fields_are_flags_under_their_names(flags):
    words = "--attention-softmax-in-fp32 --no-masked-softmax-fusion --overlap-grad-reduce --loss-scale 1024"
    config = parse_config(flags(*words.split()))
    assert config.megatron == {
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "overlap_grad_reduce": True,
        "loss_scale": 1024.0,
    }


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-rope-fusion", "apply_rope_fusion", False),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
        ("--no-bias-swiglu-fusion", "bias_activation_fusion", False),
        ("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
    ],
)
def test_megatron_lms_own_names(flags, words, field, value):
    assert parse_config(flags(*words.split())).megatron == {field: value}


def test_the_last_of_two_names_for_one_field_wins(flags):
    words = "--layernorm-epsilon 3 --norm-epsilon 2 --layernorm-epsilon 1e-6"
    assert parse_config(flags(*words.split())).megatron["layernorm_epsilon"] == 1e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vllm-max-num-seqs x", "--vllm-max-num-seqs expects a whole number, not 'x'"),
        ("--vllm-max-model-len 4z", "--vllm-max-model-len expects a whole number, perhaps as 4k or 1.5m, not '4z'"),
        (
            "--vllm-speculative-config ngram",
            "--vllm-speculative-config expects JSON, an object or a list, e.g. '{\"key\": 1}', not 'ngram'",
        ),
        (
            "--vllm-dtype int3",
            "--vllm-dtype expects one of auto, bfloat16, float, float16, float32, half, not 'int3'",
        ),
        ("--vllm-enforce-eager 1", "unexpected '1': --vllm-enforce-eager takes no value"),
        ("--no-vllm-max-num-seqs", "unknown flag --no-vllm-max-num-seqs; did you mean --vllm-max-num-seqs?"),
        ("--hidden-dropout x", "--hidden-dropout expects a number, not 'x'"),
        ("--vllm-model x", "--vllm-model cannot be given: use --hf-checkpoint"),
        (
            "--vllm-tensor-parallel-size 2",
            "--vllm-tensor-parallel-size cannot be given: use --rollout-num-gpus-per-engine",
        ),
        ("--vllm-seed 2", "--vllm-seed cannot be given: use --rollout-seed"),
        ("--vllm-port 80", "--vllm-port cannot be given: vime gives each engine a free port on its own"),
        ("--router-port 80", "--router-port cannot be given: use --vllm-router-port"),
        ("--params-dtype x", "--params-dtype cannot be given: use --bf16, --fp16 or --fp32"),
        (
            "--window-size 8",
            "--window-size cannot be given: attention is over the whole sample: no supported model has a window",
        ),
        ("--moe-latent-size 8", "--moe-latent-size cannot be given: no supported model has experts on latents"),
        (
            "--moe-expert-capacity-factor 1.0",
            "--moe-expert-capacity-factor cannot be given: no token is dropped: engines drop none either",
        ),
        (
            "--moe-router-force-load-balancing",
            "--moe-router-force-load-balancing cannot be given: tokens go to the experts that the router chooses, as "
            "in the engines",
        ),
        ("--init-method x", "--init-method cannot be given: no flag can give it: it is a Python object"),
    ],
)
def test_one_line_says_what_is_wrong(flags, words, message):
    assert resolve(flags(*words.split())).violations == (message,)


@pytest.mark.parametrize("program", ["vllm", "router", "megatron"])
def test_every_owned_flag_exists(program):
    unknown = set(OWNED[program]) - set(manifest(program))
    assert not unknown


def test_aliases_do_not_hide_fields_of_the_same_name():
    fields = set(manifest("megatron"))
    assert fields & set(ALIASES) == {"moe-layer-freq"}, "ours reads the lists that scripts write as Python"


@pytest.mark.parametrize("program", ["megatron", "router", "vllm"])
def test_manifests_are_those_of_the_installed_versions(program):
    """Names and kinds; defaults and help may differ between the builds for CPUs and GPUs."""
    script = (
        f"import json, sys; sys.path.insert(0, 'tools'); import make_flag_manifests as m; "
        f"entries = m.MAKERS[{program!r}](); print('\\n' + json.dumps(entries))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    installed = {each["flag"]: _essence(each) for each in json.loads(done.stdout.splitlines()[-1])}
    path = ROOT / "vime" / "config" / "foreign" / f"{program}.json"
    committed = {each["flag"]: _essence(each) for each in json.loads(path.read_text())}
    assert committed == installed, "run tools/make_flag_manifests.py"


def _essence(entry):
    return {key: entry.get(key) for key in ("dest", "kind", "list", "append", "negatable")}
