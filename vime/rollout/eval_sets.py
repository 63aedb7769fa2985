"""Evaluation sets, from the configuration to something that can be run: each with prompts, sampling and grading of its
own, where the configuration says so."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vime.config import Config
from vime.config.eval_datasets import EvalDataset, eval_datasets
from vime.data.jsonl import Keys
from vime.data.prompt_set import Limit, PromptSet
from vime.data.source import PromptSource, encoder_of
from vime.plugins import Hook, Hooks
from vime.plugins import rollout as contracts
from vime.plugins.catalog import load_hook, log_file
from vime.plugins.contract import Contract
from vime.rewards import registry
from vime.rewards.hub import RewardHub
from vime.rollout.evaluation import EvalSet
from vime.rollout.limits import context_limit, prompt_limit
from vime.rollout.runner import Rewarder, Runner
from vime.types import Group, Sample, SamplingParams

__all__ = [
    "EvalInput",
    "eval_context",
    "eval_dialogues",
    "eval_prompt_set",
    "load_eval_inputs",
    "make_eval_set",
    "with_tool_key",
]


@dataclass(frozen=True, kw_only=True)
class EvalInput:
    """What of a set is read before anything starts."""

    dataset: EvalDataset
    source: PromptSource
    custom_rm: Hook | None
    custom_generate: Hook | None
    max_context: int  # tokens of prompt and response together


def load_eval_inputs(config: Config, hooks: Hooks, tokenizer: Any) -> tuple[EvalInput, ...]:
    """All sets of a run.

    Raises:
        UserError: a file, row or function cannot be used; one line each.
    """
    return tuple(_load(dataset, config, hooks, tokenizer) for dataset in eval_datasets(config))


def _load(dataset: EvalDataset, config: Config, hooks: Hooks, tokenizer: Any) -> EvalInput:
    context = eval_context(config, dataset)
    source = PromptSource(
        eval_prompt_set(config, dataset, context),
        encoder=encoder_of(with_tool_key(config, dataset.tool_key), tokenizer),
        n_samples=dataset.n_samples_per_eval_prompt,
        seed=config.data.rollout_seed,
    )
    load = functools.partial(_hook, config=config, hooks=hooks, dataset=dataset)
    return EvalInput(
        dataset=dataset,
        source=source,
        custom_rm=load(dataset.custom_rm_path, contracts.CUSTOM_RM),
        custom_generate=load(dataset.custom_generate_function_path, contracts.CUSTOM_GENERATE),
        max_context=context.tokens,
    )


def eval_context(config: Config, dataset: EvalDataset) -> Limit:
    """Tokens of prompt and response together."""
    return context_limit(config, dataset.max_context_len, f"max_context_len of the evaluation set {dataset.name}")


def eval_prompt_set(config: Config, dataset: EvalDataset, context: Limit) -> PromptSet:
    """Its file, and what is asked of that."""
    own_generation = dataset.custom_generate_function_path or config.hooks.eval_function_path
    return dataclasses.replace(
        eval_dialogues(config, dataset),
        needs_label=dataset.grader is not None and registry.needs_label(dataset.grader),
        needs_text=not config.data.apply_chat_template and own_generation is None,
        limit=prompt_limit(context, dataset.max_prompt_len, f"max_prompt_len of the evaluation set {dataset.name}"),
    )


def eval_dialogues(config: Config, dataset: EvalDataset) -> PromptSet:
    """The file of an evaluation set, and what fine-tuning asks of it."""
    keys = Keys(input=dataset.input_key, label=dataset.label_key, metadata=dataset.metadata_key, tools=dataset.tool_key)
    return PromptSet(spec=dataset.path, keys=keys, skip_bad_rows=config.data.skip_bad_rows)


def with_tool_key(config: Config, tool_key: str) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tool_key=tool_key))


def _hook(path: str | None, contract: Contract, *, config: Config, hooks: Hooks, dataset: EvalDataset) -> Hook | None:
    """The run's own where the set names no other one."""
    if path is None:
        return None
    if path == getattr(config.hooks, contract.name):
        return hooks.get(contract)
    where = f"--eval-config {config.evaluation.eval_config}: {dataset.name}: {contract.name}"
    return load_hook(path, where, contract, log_file(config))


def make_eval_set(
    item: EvalInput, config: Config, sampling: SamplingParams, hub: RewardHub, make_runner: Callable[[Rewarder], Runner]
) -> EvalSet:
    """A set that can be run.

    Args:
        sampling: how rollouts are sampled.
        hub: grades rollouts; what it holds is shared.
        make_runner: of answers to this set, from what grades them.
    """
    dataset = item.dataset
    settings = dataclasses.replace(
        config.reward,
        rm_type=dataset.rm_type,
        group_rm=dataset.group_rm,
        reward_key=dataset.reward_key,
        eval_reward_key=dataset.reward_key,
    )
    return EvalSet(
        name=dataset.name,
        groups=lambda: _fresh(item.source, dataset.metadata_overrides),
        sampling=dataclasses.replace(
            sampling,
            max_tokens=dataset.max_response_len,
            temperature=dataset.temperature,
            top_p=dataset.top_p,
            top_k=dataset.top_k,
            min_tokens=dataset.min_new_tokens,
            stop=dataset.stop,
            stop_token_ids=dataset.stop_token_ids,
            routed_experts_prompt_start=None,  # nobody trains on them
        ),
        score=functools.partial(Sample.score, reward_key=dataset.reward_key),
        runner=make_runner(hub.sharing(settings, item.custom_rm)),
    )


def _fresh(source: PromptSource, overrides: Mapping[str, Any]) -> list[Group]:
    groups = source.once_each()
    for sample in (sample for group in groups for sample in group):
        sample.metadata |= copy.deepcopy(dict(overrides))
    return groups
