"""Flags against the model of --hf-checkpoint: its config.json is right, flags only repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vime.config.config import Config
from vime.config.kinds import human_int
from vime.config.rules.base import Violation, known, option
from vime.config.rules.expected import EXPECTED, agrees
from vime.config.vllm_build import is_cpu_build
from vime.errors import UserError

if TYPE_CHECKING:
    from vime.models import ModelShape

_ELSEWHERE = "an engine that gets keys and values from elsewhere does not know where their tokens went"
CANNOT_TELL_ROUTES = {  # flags of vLLM: what they may be all the same, and why they may be nothing else
    "decode_context_parallel_size": (1, "an engine that divides contexts tells no routes"),
    "kv_transfer_config": (None, _ELSEWHERE),
    "kv_offloading_size": (None, _ELSEWHERE),
}
CPUS_CANNOT_TELL_ROUTES = {
    "scheduler_cls": (None, "on CPUs vime needs a scheduler of its own to record routes"),
    "worker_cls": ("auto", "on CPUs vime needs a worker of its own to record routes"),
}


def shape_of(config: Config) -> ModelShape | None:
    """The model's shape; None where another rule already says that there is none to read."""
    given = config.checkpoint.hf_checkpoint
    if not known(given) or not (Path(given) / "config.json").is_file():
        return None
    from vime.models import load_shape

    return load_shape(given)


def matches_config_json(config: Config) -> Iterator[Violation]:
    try:
        shape = shape_of(config)
    except UserError as error:
        yield Violation(f"--hf-checkpoint: {error}")
        return
    if shape is None:
        return
    where = Path(config.checkpoint.hf_checkpoint) / "config.json"
    for key, expected in EXPECTED.items():
        given, said = config.megatron.get(key), expected.of(shape)
        if key in config.megatron and not agrees(key, given, said):
            yield Violation(f"{expected.flag} {given} differs from {where}, which says {said}", (key,))
    yield from _vocabulary(config, shape, where)


def _vocabulary(config: Config, shape: ModelShape, where: Path) -> Iterator[Violation]:
    """Megatron-LM's padded sizes are allowed, smaller ones are not."""
    given = config.checkpoint.vocab_size
    if given is not None and given < shape.vocab_size:
        yield Violation(f"--vocab-size {given} is less than the {shape.vocab_size} of {where}", ("vocab_size",))


def engine_layout(config: Config) -> Iterator[Violation]:
    """vLLM cuts attention heads and MLPs; key/value heads may also be fewer than ranks, which then share them."""
    shape, size, slots = (
        shape_or_none(config),
        config.cluster.rollout_num_gpus_per_engine,
        config.cluster.rollout_num_gpus,
    )
    if shape is None or not known(slots) or size < 1 or slots < 1:
        return
    missed = engine_misses(shape, size)
    if missed:
        sizes = [each for each in range(1, slots + 1) if slots % each == 0 and not engine_misses(shape, each)]
        offer = " or ".join(map(str, sorted(sorted(sizes, key=lambda each: (abs(each - size), -each))[:2])))
        yield Violation(
            f"--rollout-num-gpus-per-engine {size} does not divide the model's {' and '.join(missed)}; nearest that "
            f"work: {offer}"
        )


def engine_misses(shape: ModelShape, size: int) -> list[str]:
    """What an engine of ``size`` slots cannot cut."""
    cut = [("attention heads", shape.num_attention_heads)]
    groups = shape.num_query_groups
    if shape.mla is None and not (size > groups and size % groups == 0):
        cut.append(("key/value heads", groups))
    if shape.moe is None or shape.moe.dense_layers:
        cut.append(("channels of an MLP", shape.ffn_hidden_size))
    if shape.moe is not None:
        cut.append(("channels of an expert", shape.moe.ffn_hidden_size))
    return [f"{number} {what}" for what, number in cut if number % size]


def whole_weights(config: Config) -> Iterator[Violation]:
    """Engines would keep 8-bit weights and take the whole ones that training sends for such."""
    shape = shape_or_none(config)
    if shape is None or not config.has_engines:
        return
    from vime.models.fp8 import block_of

    folder = Path(config.checkpoint.hf_checkpoint)
    try:
        quantised = block_of(folder) is not None
    except UserError as error:
        yield Violation(f"--hf-checkpoint: {error}")
        return
    if quantised:
        yield Violation(
            f"--hf-checkpoint {folder} has 8-bit weights, and engines can only be given whole ones: make a bfloat16 "
            "folder of it with tools/convert_hf_to_torch_dist.py and then tools/convert_torch_dist_to_hf.py"
        )


def rotary_positions(config: Config) -> Iterator[Violation]:
    """Under Transformer Engine Megatron rotates by itself, and not everything can be said to it."""
    shape = shape_or_none(config)
    if shape is None or shape.rotary_by_megatron or config.megatron.get("transformer_impl") != "transformer_engine":
        return
    yield Violation(
        f"--transformer-impl transformer_engine cannot rotate positions as {shape.architecture} does "
        f"({shape.rope_scaling or 'latent attention'}); leave it local",
        ("transformer_impl",),
    )


def routing_replay(config: Config) -> Iterator[Violation]:
    """Routes are those of experts, and two of Megatron's ways to choose cannot be told which to take."""
    shape = shape_or_none(config)
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if not getattr(config.algorithm, name) or shape is None:
            continue
        if shape.moe is None:
            yield Violation(f"{option(name)} needs a mixture-of-experts model, which {shape.architecture} is not")
            continue
        if config.megatron.get("moe_router_load_balancing_type") == "sinkhorn":
            yield Violation(f"{option(name)} and --moe-router-load-balancing-type sinkhorn exclude each other")
        if config.megatron.get("moe_router_fusion"):
            yield Violation(f"{option(name)} and --moe-router-fusion exclude each other")


def engines_tell_routes(config: Config) -> Iterator[Violation]:
    """What keeps an engine from telling the routes of all tokens, or whatever samples from doing so."""
    if not config.algorithm.use_rollout_routing_replay:
        return
    flag = option("use_rollout_routing_replay")
    if config.algorithm.is_sft:
        yield Violation(f"{flag}: fine-tuning on given dialogues samples nothing, so there are no routes to follow")
    if config.vllm.get("enable_prefix_caching") is False:
        yield Violation(f"{flag} needs the prefix cache of the engines: leave out --no-vllm-enable-prefix-caching")
    flags = CANNOT_TELL_ROUTES | (CPUS_CANNOT_TELL_ROUTES if is_cpu_build() else {})
    for name, (harmless, why) in flags.items():
        if config.vllm.get(name) not in (None, harmless):
            yield Violation(f"{flag} and {option('vllm_' + name)} exclude each other: {why}", ("vllm_" + name,))


def balancing_loss(config: Config) -> Iterator[Violation]:
    """One of Megatron's other losses takes a pack of many samples for one sequence; the other one is not proven."""
    kind, coef = config.megatron.get("moe_router_load_balancing_type"), config.megatron.get("moe_aux_loss_coeff")
    if coef and kind not in (None, "aux_loss", "none"):
        yield Violation(
            f"--moe-router-load-balancing-type {kind} with --moe-aux-loss-coeff {coef}: only aux_loss balances packed "
            "samples",
            ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
        )


def draft_layers(config: Config) -> Iterator[Violation]:
    """One layer behind the decoder can be trained, if the model has it."""
    algorithm, shape = config.algorithm, shape_or_none(config)
    wanted = algorithm.mtp_num_layers
    if wanted is None:
        if algorithm.enable_mtp_training:
            yield Violation("--enable-mtp-training needs --mtp-num-layers 1: the layer to train")
    elif wanted != 1:
        yield Violation(
            f"--mtp-num-layers {wanted}: only a single layer, 1, can be part of the model", ("mtp_num_layers",)
        )
    elif shape is not None and not shape.num_mtp_layers:
        where = Path(config.checkpoint.hf_checkpoint) / "config.json"
        yield Violation(f"--mtp-num-layers 1: the model has no such layer: {where} has no num_nextn_predict_layers")
    if algorithm.enable_mtp_training and config.megatron.get("transformer_impl") == "transformer_engine":
        yield Violation("--enable-mtp-training needs --transformer-impl local")


def prompts_fit(config: Config) -> Iterator[Violation]:
    """A prompt must leave room for one token of response."""
    limits = {
        "--rollout-max-prompt-len": (config.data.rollout_max_prompt_len, config.rollout.rollout_max_context_len),
        "--eval-max-prompt-len": (config.evaluation.eval_max_prompt_len, config.evaluation.eval_max_context_len),
    }
    for flag, (prompt, context) in limits.items():
        if flag.startswith("--eval") and config.origins.get("eval_max_prompt_len", "").startswith("derived"):
            continue
        name, limit = min(_context_limits(config, context), key=lambda each: each[1], default=("", None))
        if prompt is not None and limit is not None and prompt > limit - 1:
            yield Violation(f"{flag} {prompt} must be at most {limit - 1}: {name} is {limit}, with one token to answer")


def context_fits(config: Config) -> Iterator[Violation]:
    contexts = {"--rollout-max-context-len": config.rollout.rollout_max_context_len}
    if not config.origins.get("eval_max_context_len", "").startswith("derived"):
        contexts["--eval-max-context-len"] = config.evaluation.eval_max_context_len
    for flag, context in contexts.items():
        for name, limit in _context_limits(config, None):
            if context is not None and context > limit:
                yield Violation(f"{flag} {context} is more than {name}, which is {limit}")


def response_fits(config: Config) -> Iterator[Violation]:
    """A doubt: what is too long for the context ends there."""
    response = config.rollout.rollout_max_response_len
    limits = _context_limits(config, config.rollout.rollout_max_context_len)
    name, limit = min(limits, key=lambda each: each[1], default=("", None))
    if config.has_engines and known(response) and limit is not None and response >= limit:
        yield Violation(
            f"--rollout-max-response-len {response} cannot be reached: {name} is {limit}, with the prompt in it"
        )


def exact_context(config: Config) -> Iterator[Violation]:
    """Sparse attention is trained as dense attention, which it equals as long as it chooses every token."""
    shape = shape_or_none(config)
    longest = None if shape is None else shape.longest_exact_context
    if shape is None or longest is None:
        return
    prompt, response = config.data.rollout_max_prompt_len, config.rollout.rollout_max_response_len
    limits = [limit for _, limit in _context_limits(config, config.rollout.rollout_max_context_len)]
    if prompt is not None and known(response):
        limits.append(prompt + response)
    if min(limits) > longest:
        yield Violation(
            f"{shape.architecture} can be trained on up to {longest} tokens, its index_topk, and a rollout can have "
            f"{min(limits)}: give --rollout-max-context-len {longest} or less",
            ("rollout_max_context_len",),
        )


def _context_limits(config: Config, context: int | None) -> Iterator[tuple[str, int]]:
    if context is not None:
        yield "the longest context", context
    engine = human_int(config.vllm.get("max_model_len"))
    if engine is not None:
        yield "--vllm-max-model-len", engine
    shape = shape_or_none(config)
    if shape is not None and engine is None:
        yield "the model's context", shape.max_position_embeddings


def shape_or_none(config: Config) -> ModelShape | None:
    try:
        return shape_of(config)
    except UserError:
        return None


WARNINGS = (response_fits,)
RULES = (
    matches_config_json,
    engine_layout,
    whole_weights,
    rotary_positions,
    routing_replay,
    engines_tell_routes,
    balancing_loss,
    draft_layers,
    prompts_fit,
    context_fits,
    exact_context,
)
