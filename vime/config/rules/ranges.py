"""Numbers and their ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vime.config.config import Config
from vime.config.rules.base import Violation, option


@dataclass(frozen=True, slots=True)
class Range:
    """From ``low`` to ``high``; each end may be excluded."""

    low: float
    high: float = math.inf
    above: bool = False  # low itself is excluded
    below: bool = False  # high itself is excluded
    why: str = ""

    def __contains__(self, value: float) -> bool:
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"


def _each(names: str, allowed: Range) -> Iterable[tuple[str, Range]]:
    return ((name, allowed) for name in names.split())


RANGES: Mapping[str, Range] = dict(
    (
        *_each(
            "actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node "
            "rollout_num_gpus_per_engine num_gpus_per_node "
            "distributed_timeout_minutes save_interval make_vocab_size_divisible_by rollout_batch_size "
            "n_samples_per_prompt over_sampling_batch_size num_epoch "
            "rollout_max_response_len rollout_max_prompt_len rollout_max_context_len "
            "global_batch_size num_steps_per_rollout micro_batch_size max_tokens_per_gpu log_probs_max_tokens_per_gpu "
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
            "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
            "expert_model_parallel_size expert_tensor_parallel_size recompute_num_layers rm_workers eval_interval "
            "n_samples_per_eval_prompt eval_max_response_len eval_max_prompt_len eval_max_context_len "
            "vllm_server_concurrency update_weight_buffer_size lr_decay_iters vocab_size "
            "overlong_buffer_len ref_update_interval update_weights_interval max_groups_ahead",
            Range(1),
        ),
        *_each(
            "num_critic_only_steps critic_lr value_clip max_refill_rounds max_sample_requeues "
            "num_rollout ckpt_step ref_ckpt_step opd_teacher_ckpt_step start_rollout_id train_memory_margin_bytes "
            "lr min_lr lr_warmup_init "
            "lr_warmup_iters weight_decay clip_grad eps_clip_high kl_loss_coef kl_coef eval_min_new_tokens "
            "mtp_loss_scaling_factor "
            "rollout_health_check_first_wait weight_probe_interval eval_temperature rollout_seed seed rollout_num_gpus "
            "overlong_penalty_factor tis_clip_low tis_veto opsm_delta max_staleness",
            Range(0),
        ),
        *_each(
            "rm_timeout_s agent_timeout_s request_timeout_s rollout_function_timeout_s engine_start_timeout_s "
            "weight_sync_timeout_s rollout_health_check_interval rollout_health_check_timeout",
            Range(0, above=True),
        ),
        ("agent_max_transcripts", Range(1, 8192, why="each is a sample of its own, and so many have indices")),
        ("agent_port", Range(0, 65535)),
        *_each("adam_beta1 adam_beta2 lr_warmup_fraction", Range(0, 1, below=True)),
        *_each("adam_eps opd_kl_coef tis_clip dr_grpo_divisor", Range(0, above=True)),
        *_each("rollout_top_p eval_top_p", Range(0, 1, above=True)),
        *_each("gamma lambd", Range(0, 1)),
        ("eps_clip", Range(0, 1, below=True)),
        ("eps_clip_c", Range(1, above=True, why="it bounds the ratio of negative advantages")),
        (
            "rollout_temperature",
            Range(0, above=True, why="log-probs are divided by it; --eval-temperature 0 evaluates greedily"),
        ),
        ("vllm_router_port", Range(1, 65535, why="it is a port")),
    )
)


def _given(config: Config) -> dict[str, Any]:
    """The values that were not derived: a derived one repeats the mistake of its source."""
    return {name: v for name, v in config.flat().items() if not config.origins.get(name, "").startswith("derived")}


def numbers(config: Config) -> Iterator[Violation]:
    values = _given(config)
    for name, allowed in RANGES.items():
        value = values.get(name)
        if value is not None and value not in allowed:
            why = f" ({allowed.why})" if allowed.why else ""
            yield Violation(f"{option(name)} must be {allowed}, not {value}{why}", (name,))


def top_k(config: Config) -> Iterator[Violation]:
    values = _given(config)
    for name in ("rollout_top_k", "eval_top_k"):
        value = values.get(name, -1)
        if value < 1 and value != -1:
            yield Violation(f"{option(name)} must be at least 1, or -1 for all tokens, not {value}", (name,))


def api_servers(config: Config) -> Iterator[Violation]:
    count = config.vllm.get("api_server_count")
    if count is not None and count < 1:
        yield Violation(f"--vllm-api-server-count must be at least 1, not {count}", ("api_server_count",))


RULES = (numbers, top_k, api_servers)
