"""Trials of the functions that run in the driver; what each is called with stands in ``rollout``."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vime.config import Args
from vime.plugins import answers, synthetic
from vime.plugins.contract import WrongAnswer, read_nothing
from vime.plugins.engine import synthetic_engine
from vime.plugins.train_data import train_rows
from vime.plugins.trial import Trial
from vime.types import Group, Sample, SamplingParams

GENERATED = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status")
"""Fields of a Sample that generation fills, and nobody changes afterwards."""

CONTEXT_TOKENS = 4096

IDENTITY = ("group_index", "index", "rollout_id", "prompt", "label", "session_id")


def _fields(sample: Sample, names: tuple[str, ...]) -> dict[str, Any]:
    return {f"sample.{name}": getattr(sample, name) for name in names}


def _fields_of_all(samples: list[Sample]) -> dict[str, Any]:
    return {f"samples[{i}].{name}": getattr(s, name) for i, s in enumerate(samples) for name in GENERATED}


def try_reward(trial: Trial) -> None:
    if trial.args.group_rm:
        try_group_reward(trial)
        return
    for name, sample in synthetic.reward_cases(trial):
        for evaluation in (False, True):
            kept = partial(_fields, sample, (*IDENTITY, *GENERATED))
            with trial.case(f"{name} of an evaluation" if evaluation else name, kept):
                _read_reward(trial, sample, trial.call(trial.args, sample, evaluation=evaluation))


def try_group_reward(trial: Trial) -> None:
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


@contextmanager
def _engines(trial: Trial) -> Iterator[Args]:
    """Stand-ins for the engines, and the view of the flags by which functions find them."""
    from vime.serving.client import RouterClient  # needs aiohttp and NumPy

    with synthetic_engine() as (host, port):
        client = RouterClient(f"http://{host}:{port}")
        context = trial.args.rollout_max_context_len or CONTEXT_TOKENS
        yield trial.args.extended(
            vllm_router_ip=host, vllm_router_port=port, generator=client, max_context_tokens=context
        )
        trial.run_coroutine(client.close())


def try_generate(trial: Trial) -> None:
    rows = trial.rows or synthetic.ROWS
    with _engines(trial) as args:
        for number, row in enumerate(rows):
            for max_tokens in (64, 2):
                sample = synthetic.fresh_sample(row, index=number, group=number)
                params = request_params(SamplingParams(max_tokens=max_tokens, seed=1))
                with trial.case(f"at most {max_tokens} tokens", partial(_fields, sample, IDENTITY)):
                    given = answers.Identity.of(sample)
                    answer = trial.call(args, sample, dict(params), evaluation=max_tokens == 2)
                    answers.generated_samples(copy.deepcopy(answer), given)  # which names the children


def try_rollout(trial: Trial) -> None:
    with _engines(trial) as args, trial.case("a rollout"):
        answer = trial.call(args, synthetic.ROLLOUT_ID, synthetic.Source(trial), evaluation=False)
        groups, _ = answers.groups_and_metrics(answer)
        wanted = args.rollout_batch_size
        if len(groups) != wanted:
            raise WrongAnswer(f"returned {len(groups)} groups for --rollout-batch-size {wanted}")
        if all(sample.reward is None for sample in synthetic.flat(groups)):
            raise WrongAnswer("returned samples without a reward; a rollout function grades them too")


def try_evaluation(trial: Trial) -> None:
    with _engines(trial) as args, trial.case("an evaluation"):
        answer = trial.call(args, synthetic.ROLLOUT_ID, synthetic.Source(trial), evaluation=True)
        answers.eval_data_and_metrics(answer)


def try_data_source(trial: Trial) -> None:
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
            answers.whole_length(trial.call(function=source.__len__))


def try_sample_hook(trial: Trial) -> None:
    for name, sample in synthetic.reward_cases(trial):
        with trial.case(name, partial(_fields, sample, IDENTITY)):
            given = answers.Identity.of(sample)
            answer = trial.call(trial.args, sample, rollout_id=synthetic.ROLLOUT_ID, evaluation=False)
            answers.hooked_sample(answer, sample, given)


def try_dynamic_filter(trial: Trial) -> None:
    names = ("a group of mixed rewards", "a group that is all right", "a group that is all wrong")
    for name, group in zip(names, synthetic.graded_groups(trial), strict=True):
        with trial.case(name, partial(dict, samples=group)):
            answers.kept_group(trial.call(trial.args, group))
    for group in synthetic.graded_groups(trial, failures=True)[::2]:
        with trial.case("a group with a sample that has no reward"):
            answers.kept_group(trial.call(trial.args, group))


def try_buffer_filter(trial: Trial) -> None:
    for rollout_id, wanted in ((synthetic.ROLLOUT_ID, 2), (None, 5)):
        buffer = synthetic.graded_groups(trial)
        before = list(buffer)
        with trial.case(f"{wanted} of {len(buffer)} groups"):
            answer = trial.call(trial.args, rollout_id, buffer, wanted)
            answers.taken_groups(answer, buffer, before, wanted)


def try_all_samples(trial: Trial) -> None:
    groups = synthetic.graded_groups(trial, failures=True)
    with trial.case("graded groups, with a sample that failed"):
        read_nothing(trial.call(trial.args, groups, synthetic.Source(trial)))


def try_convert(trial: Trial) -> None:
    for failures in (False, True):
        samples = synthetic.flat(synthetic.graded_groups(trial, failures=failures))
        with trial.case("samples of which some have no reward" if failures else "graded samples"):
            score = partial(Sample.score, reward_key=trial.args.reward_key)
            train_rows(trial.call(trial.args, samples), samples, score)


def try_post_write(trial: Trial) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(b"")
        with trial.case("a folder of weights"):
            read_nothing(trial.call(trial.args, folder, ["http://127.0.0.1:8000"]))
            if not (Path(folder) / "model.safetensors").is_file():
                raise WrongAnswer("must leave the weights where they are: engines read them next")


def try_sample_filter(trial: Trial) -> None:
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


def try_post_process(trial: Trial) -> None:
    groups = synthetic.graded_groups(trial)
    interleaved = sorted(synthetic.flat(groups), key=lambda sample: (sample.index or 0) % 4)
    for name, samples in (("uneven groups", synthetic.flat(groups)), ("groups in no order", interleaved)):
        with trial.case(name, partial(dict, samples=samples)):
            answers.rewards_pair(trial.call(trial.args, samples), len(samples))
    alone = samples[:1]
    with trial.case("a single sample", partial(dict, samples=alone)):
        answers.rewards_pair(trial.call(trial.args, alone), 1)


def try_rollout_log(trial: Trial) -> None:
    samples = synthetic.flat(synthetic.graded_groups(trial, failures=True))
    metrics = {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 3.2}
    with trial.case("a rollout", partial(dict, samples=samples)):
        answers.logged(trial.call(synthetic.ROLLOUT_ID, trial.args, samples, metrics, 12.5), metrics)


def try_eval_log(trial: Trial) -> None:
    samples = synthetic.graded_groups(trial)[0]
    data = {"gsm8k": {"rewards": [1.0, 0.0, 1.0, 0.0], "truncated": [False] * 4, "samples": samples}}
    with trial.case("an evaluation", partial(dict, data=data)):
        metrics = {"eval/gsm8k": 0.5}
        answers.logged(trial.call(synthetic.ROLLOUT_ID, trial.args, data, metrics), metrics)


def request_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as users' functions get them: a dict that fits into a request to the engine."""
    values = dataclasses.asdict(params)
    if values["routed_experts_prompt_start"] is None:
        del values["routed_experts_prompt_start"]
    return values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
