"""Contracts of the functions that run in the driver: where prompts come from, how answers are made, graded and told."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

from vime.plugins import answers, synthetic
from vime.plugins.contract import Contract, WrongAnswer, read_nothing
from vime.plugins.engine import synthetic_engine
from vime.plugins.trial import Trial
from vime.types import Group, Sample, SamplingParams

GENERATED = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status")
"""Fields of a Sample that generation fills, and nobody changes afterwards."""

IDENTITY = ("group_index", "index", "rollout_id", "prompt", "label", "session_id")


def _fields(sample: Sample, names: tuple[str, ...]) -> dict[str, Any]:
    return {f"sample.{name}": getattr(sample, name) for name in names}


def _fields_of_all(samples: list[Sample]) -> dict[str, Any]:
    return {f"samples[{i}].{name}": getattr(s, name) for i, s in enumerate(samples) for name in GENERATED}


def _try_reward(trial: Trial) -> None:
    if trial.args.group_rm:
        _try_group_reward(trial)
        return
    for name, sample in synthetic.reward_cases(trial):
        for evaluation in (False, True):
            kept = partial(_fields, sample, (*IDENTITY, *GENERATED))
            with trial.case(f"{name} of an evaluation" if evaluation else name, kept):
                _read_reward(trial, sample, trial.call(trial.args, sample, evaluation=evaluation))


def _try_group_reward(trial: Trial) -> None:
    cases = list(synthetic.reward_cases(trial))
    for count in (len(cases), 1):
        samples = [sample for _, sample in cases[:count]]
        with trial.case(f"a group of {count}", partial(_fields_of_all, samples)):
            rewards = answers.check_sequence(trial.call(trial.args, list(samples)), count, "rewards")
            for sample, reward in zip(samples, rewards, strict=True):
                _read_reward(trial, sample, reward)


def _read_reward(trial: Trial, sample: Sample, reward: Any) -> None:
    from vime.rewards.values import RewardFailed, set_value  # the reward hub uses this package

    try:
        set_value(copy.copy(sample), reward, trial.args.reward_key)
    except RewardFailed as error:
        raise WrongAnswer(str(error)) from None


def _try_generate(trial: Trial) -> None:
    rows = trial.rows or synthetic.ROWS
    with synthetic_engine() as (host, port):
        args = trial.args.extended(vllm_router_ip=host, vllm_router_port=port)
        for number, row in enumerate(rows):
            for max_tokens in (64, 2):
                sample = synthetic.fresh_sample(row, index=number, group=number)
                params = request_params(SamplingParams(max_tokens=max_tokens, seed=1))
                with trial.case(f"at most {max_tokens} tokens", partial(_fields, sample, IDENTITY)):
                    answer = trial.call(args, sample, dict(params), evaluation=max_tokens == 2)
                    answers.generated_sample(answer, number, number)


def _try_rollout(trial: Trial) -> None:
    with synthetic_engine() as (host, port):
        args = trial.args.extended(vllm_router_ip=host, vllm_router_port=port)
        with trial.case("a rollout"):
            answer = trial.call(args, synthetic.ROLLOUT_ID, synthetic.Source(trial), evaluation=False)
            groups, _ = answers.groups_and_metrics(answer)
            wanted = args.rollout_batch_size
            if len(groups) != wanted:
                raise WrongAnswer(f"returned {len(groups)} groups for --rollout-batch-size {wanted}")
            if all(sample.reward is None for sample in synthetic.flat(groups)):
                raise WrongAnswer("returned samples without a reward; a rollout function grades them too")


def _try_evaluation(trial: Trial) -> None:
    with synthetic_engine() as (host, port):
        args = trial.args.extended(vllm_router_ip=host, vllm_router_port=port)
        with trial.case("an evaluation"):
            answer = trial.call(args, synthetic.ROLLOUT_ID, synthetic.Source(trial), evaluation=True)
            answers.eval_data_and_metrics(answer)


def _try_data_source(trial: Trial) -> None:
    with trial.case("a new source"):
        source = trial.call(trial.args)
        first = answers.new_groups(trial.call(2, function=source.get_samples), 2)
        second = answers.new_groups(trial.call(1, function=source.get_samples), 1)
        if not first:
            raise WrongAnswer("gave no groups; a run needs some for every rollout")
        seen = [sample.index for group in [*first, *second] for sample in group]
        if len(set(seen)) != len(seen):
            raise WrongAnswer("gave two samples the same index; indices must be unique in the run")
        with trial.case("groups that come back"):
            trial.call(first, function=source.add_samples)
        with trial.case("saving and loading"):
            trial.call(synthetic.ROLLOUT_ID, function=source.save)
            trial.call(synthetic.ROLLOUT_ID, function=source.load)
        with trial.case("its length"):
            length = trial.call(function=source.__len__)
            if not isinstance(length, int) or length < 0:
                raise WrongAnswer(f"must say its length as a whole number, not {length!r}")


def _try_sample_filter(trial: Trial) -> None:
    groups = synthetic.graded_groups(trial, failures=True)
    before = _without_removal(groups)
    with trial.case("graded groups, with a sample that failed"):
        read_nothing(trial.call(trial.args, groups))
        removed = [sample.remove_sample for sample in synthetic.flat(groups)]
        if not all(isinstance(flag, bool) for flag in removed):
            raise WrongAnswer("must set remove_sample to True or False")
        if _without_removal(groups) != before:
            raise WrongAnswer("must change nothing but remove_sample")


def _without_removal(groups: list[Group]) -> list[Group]:
    return [[dataclasses.replace(copy.deepcopy(s), remove_sample=False) for s in group] for group in groups]


def _try_post_process(trial: Trial) -> None:
    groups = synthetic.graded_groups(trial)
    interleaved = sorted(synthetic.flat(groups), key=lambda sample: (sample.index or 0) % 4)
    for name, samples in (("uneven groups", synthetic.flat(groups)), ("groups in no order", interleaved)):
        with trial.case(name, partial(dict, samples=samples)):
            answers.rewards_pair(trial.call(trial.args, samples), len(samples))
    alone = samples[:1]
    with trial.case("a single sample", partial(dict, samples=alone)):
        answers.rewards_pair(trial.call(trial.args, alone), 1)


def _try_rollout_log(trial: Trial) -> None:
    samples = synthetic.flat(synthetic.graded_groups(trial, failures=True))
    metrics = {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 3.2}
    with trial.case("a rollout", partial(dict, samples=samples)):
        trial.call(synthetic.ROLLOUT_ID, trial.args, samples, metrics, 12.5)


def _try_eval_log(trial: Trial) -> None:
    samples = synthetic.graded_groups(trial)[0]
    data = {"gsm8k": {"rewards": [1.0, 0.0, 1.0, 0.0], "truncated": [False] * 4, "samples": samples}}
    with trial.case("an evaluation", partial(dict, data=data)):
        trial.call(synthetic.ROLLOUT_ID, trial.args, data, {"eval/gsm8k": 0.5})


def request_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as users' functions get them: a dict that fits into a request to the engine."""
    values = dataclasses.asdict(params)
    return values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}


DATA_SOURCE = Contract(
    flag="--data-source-path",
    side="rollout",
    purpose="A class that prompts come from, instead of the file of --prompt-data: a database, a generator, a mixture.",
    when="Built once, before anything starts; asked for groups whenever the sampling loop needs more. save is called "
    "with each checkpoint, load once when a run resumes.",
    arguments=("args",),
    methods={
        "get_samples": ("num_samples",),
        "add_samples": ("groups",),
        "save": ("rollout_id",),
        "load": ("rollout_id",),
        "__len__": (),
    },
    returns="get_samples: a list of groups, each a list of new samples with index and group_index. __len__: the "
    "prompts of one epoch.",
    trial=_try_data_source,
    example="examples.plugins.data_source:Additions",
)

ROLLOUT_FUNCTION = Contract(
    flag="--rollout-function-path",
    side="rollout",
    purpose="Replaces the whole generation of a rollout. For most needs a generate function is enough.",
    when="Once a rollout; a plain function runs in a thread of its own.",
    arguments=("args", "rollout_id", "data_source"),
    keywords=("evaluation",),
    is_async=None,
    returns="A list of groups (lists of graded samples), or an object that has them as samples, and perhaps metrics.",
    trial=_try_rollout,
    example="examples.plugins.rollout:one_turn",
)

EVAL_FUNCTION = Contract(
    flag="--eval-function-path",
    side="rollout",
    purpose="Replaces the whole evaluation. Without it the rollout function, if there is one, is asked with "
    "evaluation=True.",
    when="At each evaluation; a plain function runs in a thread of its own.",
    arguments=("args", "rollout_id", "data_source"),
    keywords=("evaluation",),
    is_async=None,
    returns="{name: {rewards, truncated, samples}} (rewards alone will do), or an object that has it as data, and "
    "perhaps metrics.",
    trial=_try_evaluation,
    example="examples.plugins.rollout:evaluate",
)

CUSTOM_GENERATE = Contract(
    flag="--custom-generate-function-path",
    side="rollout",
    purpose="Generates one sample within our sampling loop: tools, several turns, agents.",
    when="Once a sample, many at a time, up to the limit of concurrent requests.",
    arguments=("args", "sample", "sampling_params"),
    optional=("evaluation",),
    is_async=True,
    returns="The sample, with tokens (prompt and response), response_length, response and status; loss_mask where "
    "tokens are not the model's own; rollout_log_probs and weight_versions where they are known.",
    trial=_try_generate,
    example="examples.plugins.generate:think_twice",
)

CUSTOM_RM = Contract(
    flag="--custom-rm-path",
    side="rollout",
    purpose="Grades an answer.",
    when="Once a sample, as soon as it is generated; with --group-rm once a group, with the list of its samples. It "
    "has --rm-timeout-s for each sample.",
    arguments=("args", "sample"),
    optional=("evaluation",),
    is_async=True,
    returns="A finite number, or a dict of which --reward-key names the one to train on; with --group-rm a list of "
    "those.",
    trial=_try_reward,
    example="examples.plugins.rewards:exact_and_short",
)

ROLLOUT_SAMPLE_FILTER = Contract(
    flag="--rollout-sample-filter-path",
    side="rollout",
    purpose="Takes samples out of the loss. A removed sample still counts in its group's baseline and in the "
    "denominator.",
    when="Once a rollout, on all groups together, after grading.",
    arguments=("args", "groups"),
    returns="Nothing; it sets remove_sample = True on samples.",
    trial=_try_sample_filter,
    example="examples.plugins.filters:remove_repetitions",
)

CUSTOM_ROLLOUT_LOG = Contract(
    flag="--custom-rollout-log-function-path",
    side="rollout",
    purpose="Logs a rollout.",
    when="Once a rollout, after grading. rollout_extra_metrics are the metrics that we would log, rollout_time is in "
    "seconds.",
    arguments=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    returns="True to replace our log of the rollout; else ours follows.",
    trial=_try_rollout_log,
    example="examples.plugins.logs:log_rollout",
)

CUSTOM_EVAL_ROLLOUT_LOG = Contract(
    flag="--custom-eval-rollout-log-function-path",
    side="rollout",
    purpose="Logs an evaluation.",
    when="After each evaluation.",
    arguments=("rollout_id", "args", "data", "extra_metrics"),
    returns="True to replace our log of the evaluation; else ours follows.",
    trial=_try_eval_log,
    example="examples.plugins.logs:log_evaluation",
)

CUSTOM_REWARD_POST_PROCESS = Contract(
    flag="--custom-reward-post-process-path",
    side="rollout",
    purpose="Turns rewards into what advantages are made from, instead of the normalisation of the estimator.",
    when="Once a rollout, on all samples that have a reward.",
    arguments=("args", "samples"),
    returns="(raw rewards, rewards), two lists of finite numbers, as long as samples.",
    trial=_try_post_process,
    example="examples.plugins.rewards:rank_in_group",
)

CONTRACTS = (
    DATA_SOURCE,
    ROLLOUT_FUNCTION,
    EVAL_FUNCTION,
    CUSTOM_GENERATE,
    CUSTOM_RM,
    ROLLOUT_SAMPLE_FILTER,
    CUSTOM_ROLLOUT_LOG,
    CUSTOM_EVAL_ROLLOUT_LOG,
    CUSTOM_REWARD_POST_PROCESS,
)
