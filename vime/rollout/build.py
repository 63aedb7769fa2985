"""From a Config to prompts and a RolloutManager."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vime.config import Args, Config
from vime.config.eval_datasets import eval_datasets
from vime.config.flags import option
from vime.config.rules.base import is_given
from vime.data.chat import PromptEncoder
from vime.data.source import PromptSource, encoder_of, pop_first
from vime.data.tokenizer import load_tokenizer
from vime.errors import UserError
from vime.models import load_shape
from vime.naming import evaluation_name, rollout_name
from vime.observe.rollout_metrics import multi_turn_metrics, pass_rates, rollout_metrics
from vime.observe.signal import SignalWatch
from vime.plugins import Hook, Hooks, resolve_hooks
from vime.plugins import rollout as contracts
from vime.plugins.answers import logged
from vime.plugins.catalog import load_hook, log_file
from vime.ports import DataSource, Generator, GraderPool, Recorder, Teacher
from vime.rewards import code, registry
from vime.rewards.hub import RewardHub
from vime.rewards.pool import GraderProcessPool
from vime.rewards.remote_rm import RemoteReward
from vime.rollout.conversion import Convert, PostProcess, to_rollout_batch
from vime.rollout.distillation import Taught, Unrewarded
from vime.rollout.eval_sets import EvalInput, load_eval_inputs, make_eval_set
from vime.rollout.evaluation import Evaluated, eval_metrics, version_metrics
from vime.rollout.fully_async import continuous_sampler
from vime.rollout.generate import SingleTurn
from vime.rollout.hooks import (
    CustomSource,
    all_samples_process,
    buffer_filter,
    custom_conversion,
    custom_evaluation,
    custom_generate,
    custom_post_process,
    custom_rollout,
    dynamic_filter,
    own_generate,
    sample_filter,
    sample_hook,
)
from vime.rollout.limits import context_limit, prompt_limit
from vime.rollout.manager import EvalMetrics, RolloutManager, RolloutMetrics
from vime.rollout.openai_endpoint.entry import agent_of
from vime.rollout.openai_endpoint.server import check_address
from vime.rollout.routes import RouteCheck, route_shape
from vime.rollout.runner import Gate, Generate, Rewarder, Runner
from vime.rollout.sampling import Collected, InFlight, Judge, Sampler, keep_all, not_failed
from vime.rollout.saved import SavedRollouts, path_of, save_if_possible
from vime.rollout.shaping import equal_rewards_cancel, score_of, shape_rewards
from vime.rollout.staleness import StalenessBound, WeightHistory, drop_metrics
from vime.sandbox import SandboxError
from vime.types import Group, RolloutBatch, Sample, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Everything that is read from files before a process starts."""

    hooks: Hooks
    tokenizer: Any
    encoder: PromptEncoder
    source: DataSource
    eval_sources: tuple[EvalInput, ...]
    max_context: int  # tokens of prompt and response together
    vocab_size: int | None = None  # of the model; None: not known

    def probe_prompt(self) -> list[int]:
        """Token ids of a plain question, for the proof that the engines serve the trainer's weights."""
        return self.encoder.encode(self.encoder.render("How many days are there in a week?", {}))

    def num_rollout(self, config: Config) -> int:
        """Rollouts of the whole run."""
        return rollouts_of(config, len(self.source))


def rollouts_of(config: Config, prompts_of_an_epoch: int) -> int:
    """Rollouts of a run: ``--num-rollout``, else what ``--num-epoch`` comes to.

    Raises:
        UserError: they are none.
    """
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    assert config.rollout.num_epoch is not None, "a rule asks for one of the two"
    prompts, batch = config.rollout.num_epoch * prompts_of_an_epoch, config.rollout.rollout_batch_size
    if prompts < batch:
        raise UserError(
            f"--num-epoch {config.rollout.num_epoch} x {prompts_of_an_epoch} prompts are fewer than "
            f"--rollout-batch-size {batch}; give --num-rollout, which goes through the prompts as often as it takes"
        )
    return prompts // batch


def load_prompts(config: Config) -> Prompts:
    """Reads data sets and tokenizer and resolves the custom functions.

    Raises:
        UserError: a file, row, tokenizer or function cannot be used; one line each.
    """
    hooks = resolve_hooks(config)
    if config.runs_agents:
        agent_of(config.agent.agent_function_path, config.agent.agent_command)
    context = context_limit(config, config.rollout.rollout_max_context_len)
    checkpoint = config.checkpoint
    tokenizer = load_tokenizer(checkpoint.hf_checkpoint, trust_remote_code=checkpoint.trust_remote_code)
    encoder = encoder_of(config, tokenizer)
    own_source, own_order = hooks.get(contracts.DATA_SOURCE), hooks.get(contracts.BUFFER_FILTER)
    source: DataSource = (
        CustomSource(own_source, config.args, _group_size(config, hooks))
        if own_source
        else PromptSource.from_config(
            config,
            encoder,
            limit=prompt_limit(context, config.data.rollout_max_prompt_len),
            buffer_filter=buffer_filter(own_order, config.args) if own_order else pop_first,
        )
    )
    return Prompts(
        hooks=hooks,
        tokenizer=tokenizer,
        encoder=encoder,
        source=source,
        eval_sources=load_eval_inputs(config, hooks, tokenizer),
        max_context=context.tokens,
        vocab_size=load_shape(checkpoint.hf_checkpoint).vocab_size,
    )


def load_saved(config: Config) -> SavedRollouts:
    """The rollouts of ``--load-debug-rollout-data``, whose rewards and batches are made as the flags say.

    Raises:
        UserError: a custom function cannot be used, or a file is not there.
    """
    template, hooks, args = config.ops.load_debug_rollout_data, resolve_hooks(config), config.args
    assert template is not None and config.rollout.num_rollout is not None, "rules ask for them"
    last = path_of(template, config.rollout.num_rollout - 1)
    if not last.is_file():
        raise UserError(f"--load-debug-rollout-data: {last}, the last of --num-rollout, is not there")
    vocab_size = load_shape(config.checkpoint.hf_checkpoint).vocab_size
    convert, post_process = _convert(config, hooks, args, vocab_size), _post_process(config, hooks, args)
    check = _check(config)
    score = score_of(config)

    def make_batch(rollout_id: int, groups: Sequence[Group]) -> RolloutBatch:
        batch = convert(rollout_id, groups, post_process)
        return batch if check is None else check(batch)

    return SavedRollouts(template, make_batch, functools.partial(rollout_metrics, seconds=0, score=score))


def _group_size(config: Config, hooks: Hooks) -> int | None:
    """Of the groups of a custom source; functions that make something else of them may want others."""
    free = hooks.get(contracts.ROLLOUT_FUNCTION) or hooks.get(contracts.CUSTOM_CONVERT_SAMPLES)
    return None if free else config.rollout.n_samples_per_prompt


def make_pool(config: Config) -> GraderProcessPool:
    """The processes that grade answers."""
    reward = config.reward
    local = [name for name in _graders(config) if registry.is_local(name)]
    environment = {code.SCORE_VARIABLE: reward.rm_code_score, code.SANDBOX_VARIABLE: reward.rm_code_sandbox}
    return GraderProcessPool(
        reward.rm_workers,
        reward.rm_timeout_s,
        memory_limit_bytes=registry.address_space(local),
        preload=local,
        environment=environment,
    )


def check_endpoint(config: Config) -> None:
    """Finds out whether the endpoint of agents can listen where it shall, which it does from the first sample on.

    Raises:
        UserError: it cannot.
    """
    if config.runs_agents:
        check_address(config.agent.agent_host, config.agent.agent_port)


async def check_graders(config: Config) -> None:
    """Finds out whether graders can do their work here, which for code depends on the kernel.

    Raises:
        UserError: they cannot.
    """
    if any(name.removeprefix(registry.BOXED) == registry.CODE for name in _graders(config)):
        try:
            await code.check_sandbox(config.reward.rm_code_sandbox)
        except SandboxError as error:
            raise UserError(f"--rm-type {registry.CODE}: {error}") from error


def _graders(config: Config) -> set[str]:
    """Names of graders that the run is known to use; rows may name others."""
    used = {config.reward.rm_type, *(each.rm_type for each in eval_datasets(config))}
    return {name for name in used if name is not None}


def make_hub(config: Config, prompts: Prompts, args: Args, pool: GraderPool) -> RewardHub:
    """What gives samples their rewards; to be closed at the end."""
    return RewardHub(
        config.reward,
        pool,
        args=args,
        custom_rm=prompts.hooks.get(contracts.CUSTOM_RM),
        resolve=lambda path: load_hook(path, "custom_rm_path of a sample", contracts.CUSTOM_RM, log_file(config)),
        remote=_reward_service(config),
    )


def _reward_service(config: Config) -> RemoteReward | None:
    """The client of ``--rm-url``. A service may compute for long: it has less than the client's own deadline only where
    somebody said so."""
    reward = config.reward
    if reward.rm_url is None:
        return None
    if not is_given(config, "rm_timeout_s"):
        return RemoteReward(reward.rm_url)
    return RemoteReward(reward.rm_url, timeout_s=reward.rm_timeout_s)


def make_rewarder(
    config: Config, prompts: Prompts, hub: RewardHub, teacher: Teacher | None, failures: type[Exception]
) -> Rewarder:
    """What is done with finished samples: grading, and what a teacher on a server says of them.

    Args:
        failures: what ``teacher`` raises.
    """
    graded = config.reward.rm_type is not None or prompts.hooks.get(contracts.CUSTOM_RM) is not None
    rewarder: Rewarder = Unrewarded() if config.distillation.use_opd and not graded else hub
    return rewarder if teacher is None else Taught(rewarder, teacher, failures)


def make_manager(
    config: Config,
    prompts: Prompts,
    args: Args,
    generator: Generator,
    hub: RewardHub,
    recorder: Recorder,
    history: WeightHistory,
    rewarder: Rewarder | None = None,
) -> RolloutManager:
    """The manager of rollouts over engines that run already.

    Args:
        args: the flat view with the run-time values (address of the router) that users' functions get; here the engines
            and the length of their context are added.
        hub: grades evaluations, and rollouts unless there is a ``rewarder``.
        history: of the engines' weights, also of those before a resume.
    """
    hooks = prompts.hooks
    deadline = config.sampling.rollout_function_timeout_s
    gate = Gate(generator)
    args = args.extended(generator=gate, max_context_tokens=prompts.max_context)

    make_runner = functools.partial(_make_runner, config, prompts, args, gate)
    custom = hooks.get(contracts.CUSTOM_GENERATE)
    runner = make_runner(
        custom, prompts.max_context, config.data.tool_key, config.reward.eval_reward_key, rewarder or hub
    )
    collect, evaluate = hooks.get(contracts.ROLLOUT_FUNCTION), hooks.get(contracts.EVAL_FUNCTION)
    multiple = None if hooks.get(contracts.CUSTOM_CONVERT_SAMPLES) else config.batch.global_batch_size
    removes, processes = hooks.get(contracts.ROLLOUT_SAMPLE_FILTER), hooks.get(contracts.ROLLOUT_ALL_SAMPLES_PROCESS)
    bound, saved = staleness_bound(config, history), config.ops.save_debug_rollout_data
    return RolloutManager(
        sampler=_sampler(config, prompts.source, runner, _judge(config, hooks, args), bound),
        runner=runner,
        batch_size=config.rollout.rollout_batch_size,
        post_process=_post_process(config, hooks, args),
        convert=_convert(config, hooks, args, prompts.vocab_size),
        check=_check(config),
        metrics=_rollout_metrics(config, hooks, args, history),
        recorder=recorder,
        eval_sets=[
            make_eval_set(
                each,
                config,
                sampling_params(config),
                hub,
                functools.partial(
                    make_runner,
                    each.custom_generate,
                    each.max_context,
                    each.dataset.tool_key,
                    each.dataset.reward_key,
                ),
            )
            for each in prompts.eval_sources
        ],
        eval_metrics=_eval_metrics(hooks, args, history),
        collect=custom_rollout(
            collect, args, prompts.source, multiple=multiple, timeout_s=deadline, vocab_size=prompts.vocab_size
        )
        if collect
        else None,
        evaluate=custom_evaluation(evaluate, args, prompts.source, timeout_s=deadline) if evaluate else None,
        sample_filter=sample_filter(removes, args) if removes else None,
        save=functools.partial(save_if_possible, saved) if saved else None,
        process_all=all_samples_process(processes, args, prompts.source) if processes else None,
        bound=bound,
        look=SignalWatch(score_of(config), needs_spread=equal_rewards_cancel(config)).look,
        source_state=getattr(prompts.source, "state_dict", lambda: None),
    )


def _make_runner(
    config: Config,
    prompts: Prompts,
    args: Args,
    gate: Gate,
    custom: Hook | None,
    max_context: int,
    tool_key: str,
    eval_reward_key: str | None,
    rewarder: Rewarder,
) -> Runner:
    """What generates answers to the prompts of rollouts, or of one evaluation set, and has them graded.

    Args:
        custom: the generate function, where it is not the default one; like those of samples it gets ``args``
            with the values that follow.
    """
    log = log_file(config)
    limits: dict[str, Any] = {
        "timeout_s": config.sampling.rollout_function_timeout_s,
        "vocab_size": prompts.vocab_size,
    }
    own_args = args.extended(max_context_tokens=max_context, tool_key=tool_key, eval_reward_key=eval_reward_key)

    def own(path: str) -> Hook:
        return load_hook(path, "custom_generate_function_path of a sample", contracts.CUSTOM_GENERATE, log)

    if custom is not None:
        usual = custom_generate(custom, own_args, **limits)
    else:
        usual = _single_turn(prompts, args, gate, max_context)
    sample_hooks = prompts.hooks.all(contracts.ROLLOUT_SAMPLE_HOOK)
    return Runner(
        own_generate(usual, own, own_args, **limits),
        rewarder,
        seed=config.data.rollout_seed,
        concurrency=config.engine.vllm_server_concurrency * max(config.cluster.num_engines, 1),
        hooks=[sample_hook(hook, args, **limits) for hook in sample_hooks],
        gate=gate,
        masks_continued=config.sampling.mask_offpolicy_in_partial_rollout,
        requeues=config.sampling.max_sample_requeues if config.sampling.use_fault_tolerance else None,
    )


def staleness_bound(config: Config, history: WeightHistory) -> StalenessBound:
    """How far sampling may run ahead of training."""
    asynchrony = config.asynchrony
    return StalenessBound(
        history=history,
        max_staleness=asynchrony.max_staleness,
        policy=asynchrony.staleness_policy,
        batch_size=config.rollout.rollout_batch_size,
        runs_ahead=asynchrony.runs_ahead,
    )


def _sampler(config: Config, source: DataSource, runner: Runner, judge: Judge, bound: StalenessBound) -> Sampler:
    sampling, params = config.sampling, sampling_params(config)

    async def run(group: Group, rollout_id: int) -> Group:
        return await runner.run(group, rollout_id, params)

    if config.asynchrony.fully_async:
        return continuous_sampler(
            source,
            run,
            judge,
            bound,
            groups_ahead=config.asynchrony.max_groups_ahead,
            max_refills=sampling.max_refill_rounds,
        )
    return Sampler(
        source,
        run,
        batch_size=sampling.over_sampling_batch_size,
        judge=judge,
        in_flight=_in_flight(config),
        halt=runner.halt,
        in_order=sampling.deterministic_rollout,
        max_refills=sampling.max_refill_rounds,
        bound=bound,
    )


def _judge(config: Config, hooks: Hooks, args: Args) -> Judge:
    custom = hooks.get(contracts.DYNAMIC_SAMPLING_FILTER)
    counts = dynamic_filter(custom, args) if custom is not None else keep_all
    return not_failed(counts) if config.sampling.use_fault_tolerance else counts


def _in_flight(config: Config) -> InFlight:
    if config.asynchrony.runs_ahead:
        return InFlight.LEAVE
    if config.sampling.deterministic_rollout:
        return InFlight.FINISH
    return InFlight.ABORT if config.sampling.partial_rollout else InFlight.RESTART


def _single_turn(prompts: Prompts, args: Args, generator: Generator, max_context: int) -> Generate:
    """The default generate function."""
    tokenizer, skip = prompts.tokenizer, args.rollout_skip_special_tokens

    def decode(token_ids: Sequence[int]) -> str:
        """The text for graders and people, without the token that says that it ends."""
        ended = bool(token_ids) and token_ids[-1] == tokenizer.eos_token_id
        text: str = tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=skip)
        return text

    single_turn = SingleTurn(generator, prompts.encoder.encode, decode, max_context)

    async def generate(sample: Sample, params: SamplingParams, evaluation: bool) -> list[Sample]:
        return [await single_turn(sample, params)]

    return generate


def sampling_params(config: Config) -> SamplingParams:
    """How rollouts are sampled."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        skip_special_tokens=rollout.rollout_skip_special_tokens,
        routed_experts_prompt_start=0 if config.algorithm.use_rollout_routing_replay else None,
    )


def _rollout_metrics(config: Config, hooks: Hooks, args: Args, history: WeightHistory) -> RolloutMetrics:
    score = score_of(config)
    log = hooks.get(contracts.CUSTOM_ROLLOUT_LOG)

    def metrics(rollout_id: int, collected: Collected, seconds: float) -> dict[str, float]:
        groups = collected.groups
        found = rollout_metrics(
            groups,
            seconds,
            score=score,
            engine_slots=config.cluster.rollout_num_gpus,
            staleness_of=lambda version: rollout_id - history.trainings_of(version),
        )
        if config.ops.log_passrate:
            found |= pass_rates(groups, score)
        if config.asynchrony.staleness_policy == "drop" or collected.late:
            found |= drop_metrics(groups, collected.late)
        samples = [sample for group in groups for sample in group]
        if config.ops.log_multi_turn:
            found |= multi_turn_metrics(samples)
        found |= collected.metrics
        about = rollout_name(rollout_id)
        read = functools.partial(logged, metrics=found)
        if log is not None and log.call(rollout_id, args, samples, found, seconds, about=about, read=read):
            return {}
        return found

    return metrics


def _eval_metrics(hooks: Hooks, args: Args, history: WeightHistory) -> EvalMetrics:
    log = hooks.get(contracts.CUSTOM_EVAL_ROLLOUT_LOG)

    def metrics(rollout_id: int, evaluated: Evaluated) -> dict[str, float]:
        found = version_metrics([history.version]) | eval_metrics(evaluated.data) | dict(evaluated.metrics)
        about = f"the {evaluation_name(rollout_id)}"
        read = functools.partial(logged, metrics=found)
        if log is not None and log.call(rollout_id, args, evaluated.data, found, about=about, read=read):
            return {}
        return found

    return metrics


def _post_process(config: Config, hooks: Hooks, args: Args) -> PostProcess:
    custom = hooks.get(contracts.CUSTOM_REWARD_POST_PROCESS)
    if custom is not None:
        return custom_post_process(custom, args)
    return shape_rewards(config)


def _convert(config: Config, hooks: Hooks, args: Args, vocab_size: int | None) -> Convert:
    off_policy = config.off_policy
    needing = [name for name in ("use_tis", "use_rollout_logprobs") if getattr(off_policy, name)]
    needs_log_probs = option(needing[0]) if needing else None
    custom = hooks.get(contracts.CUSTOM_CONVERT_SAMPLES)
    if custom is not None:
        return custom_conversion(custom, args, needs_log_probs, vocab_size=vocab_size)
    return functools.partial(
        to_rollout_batch,
        score=score_of(config),
        needs_log_probs=needs_log_probs,
        exclude_zero_signal=config.algorithm.exclude_zero_signal_groups,
    )


def _check(config: Config) -> RouteCheck | None:
    shape = route_shape(config)
    return None if shape is None else RouteCheck(shape, needed=not config.algorithm.use_routing_replay)
