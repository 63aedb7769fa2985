"""Megatron's model says what transformers says, from the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.harness import config_of, make_samples, started
from vime.types import TrainSample

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.8}
TOLERANCE = 1e-5  # nats, fp32 against fp32


def expected_log_probs(model: Path, samples: tuple[TrainSample, ...], temperature: float = 1.0) -> list[torch.Tensor]:
    """Of the response tokens of each sample, one sample at a time."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [_of_response(reference, sample, temperature) for sample in samples]


def _of_response(reference: torch.nn.Module, sample: TrainSample, temperature: float) -> torch.Tensor:
    tokens = torch.tensor([sample.tokens])
    log_probs = torch.log_softmax(reference(tokens).logits[0, :-1] / temperature, -1)
    return log_probs.gather(-1, tokens[0, 1:, None]).squeeze(-1)[-sample.response_length :]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tied": True}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("glm", {}),
        ("glm4", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("deepseek_v32", {}),
        ("glm_moe_dsa", {}),
    ],
    ids=[
        "llama",
        "tied",
        "grouped queries",
        "qwen2: bias",
        "qwen3: norms of heads",
        "qwen3_moe: experts",
        "qwen3_moe: weights that do not sum to 1",
        "glm",
        "glm4: norms on both sides",
        "glm4_moe: groups of experts, a shared one, half of each head rotated",
        "deepseek_v3",
        "deepseek_v3: full queries, rotated by halves",
        "deepseek_v3: stretched positions",
        "deepseek_v32: an indexer that chooses all",
        "glm_moe_dsa: an indexer that chooses all",
    ],
)
def test_packed_log_probs_are_those_of_transformers_on_each_sample_alone(
    model_of: Callable[..., Path], family: str, overrides: dict[str, object]
) -> None:
    model = model_of(family, **overrides)
    samples = make_samples()
    with started(config_of(model, "--fp32")) as worker:
        (packed,) = worker._log_probs([worker._packer.pack(samples)])
        alone = [worker.log_probs_of(sample.tokens, len(sample.tokens) - sample.response_length) for sample in samples]
    expected = torch.cat(expected_log_probs(model, samples))
    assert expected.std() > 0.1  # the comparison means something
    assert (packed - expected).abs().max() < TOLERANCE
    assert (torch.tensor([x for each in alone for x in each]) - expected).abs().max() < TOLERANCE


def test_flags_that_repeat_the_shape_of_latent_attention_change_nothing(model_of: Callable[..., Path]) -> None:
    model, samples = model_of("deepseek_v3"), make_samples()
    words = "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 16"
    words += " --qk-pos-emb-head-dim 8 --v-head-dim 12 --kv-channels 24"
    with started(config_of(model, "--fp32", *words.split())) as worker:
        (packed,) = worker._log_probs([worker._packer.pack(samples)])
    assert (packed - torch.cat(expected_log_probs(model, samples))).abs().max() < TOLERANCE


def test_logits_are_divided_by_the_rollout_temperature(model_of: Callable[..., Path]) -> None:
    model, samples = model_of(), make_samples()
    with started(config_of(model, "--fp32", "--rollout-temperature", "0.7")) as worker:
        (packed,) = worker._log_probs([worker._packer.pack(samples)])
    assert (packed - torch.cat(expected_log_probs(model, samples, 0.7))).abs().max() < TOLERANCE


def test_positions_of_llama_3_are_stretched(model_of: Callable[..., Path]) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = model_of(rope_parameters=scaling)
    samples = make_samples(4)
    with started(config_of(model, "--fp32")) as worker:
        (packed,) = worker._log_probs([worker._packer.pack(samples)])
    assert (packed - torch.cat(expected_log_probs(model, samples))).abs().max() < TOLERANCE


def test_bf16_stays_close_to_fp32(model_of: Callable[..., Path]) -> None:
    model, samples = model_of(), make_samples()
    with started(config_of(model)) as worker:
        (packed,) = worker._log_probs([worker._packer.pack(samples)])
    assert packed.dtype == torch.float32
    assert (packed - torch.cat(expected_log_probs(model, samples))).abs().max() < 0.1
