"""Contracts of the functions that run on the ranks of the trainer. ``args.role`` says of which model: actor, critic.

Synthetic values are imported where they are used: the driver has no need of torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vime.plugins import synthetic
from vime.plugins.contract import Contract, WrongAnswer, read_nothing
from vime.plugins.tensors import token_rows
from vime.plugins.trial import Trial

READ_BACK = ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "loss_masks")
"""What of ``rollout_data`` a run reads again after --rollout-data-postprocess-path."""


def _try_init(trial: Trial) -> None:
    with trial.case("a rank of the actor"):
        read_nothing(trial.call(trial.args.extended(role="actor")))


def _try_before_log_probs(trial: Trial) -> None:
    from vime.plugins import synthetic_training

    args = trial.args.extended(role="actor")
    for name, prefix in (("the reference", "ref_"), ("the teacher", "teacher_"), ("the actor", "")):
        chunks = [synthetic_training.Stage(True, True)]
        with trial.case(name):
            read_nothing(trial.call(args, chunks, prefix))


def _try_before_step(trial: Trial) -> None:
    from vime.plugins import synthetic_training

    args = trial.args.extended(role="actor")
    model, optimizer, scheduler = synthetic_training.learner()
    for step in range(2):
        with trial.case(f"step {step}"):
            read_nothing(trial.call(args, synthetic.ROLLOUT_ID, step, [model], optimizer, scheduler))
            for name, parameter in model.named_parameters():
                if not bool(parameter.isfinite().all()):
                    raise WrongAnswer(f"left values that are not finite in the parameter {name}")


def _try_postprocess(trial: Trial) -> None:
    from vime.plugins import synthetic_training

    args = trial.args.extended(role="actor")
    for stage in ("the last pipeline stage", "another pipeline stage"):
        data = synthetic_training.rollout_data(last_stage=stage == "the last pipeline stage")
        given = [name for name in READ_BACK if name in data]
        kept = partial(_others, data)
        with trial.case(stage, kept):
            read_nothing(trial.call(args, synthetic.ROLLOUT_ID, data))
            for name in given:
                token_rows(data, name, data["response_lengths"])


def _others(data: dict[str, Any]) -> dict[str, Any]:
    return {f"rollout_data[{name!r}]": value for name, value in data.items() if name not in READ_BACK}


def _try_model_provider(trial: Trial) -> None:
    import torch

    from vime.plugins import synthetic_training

    args = trial.args.extended(role="actor")
    stages = {"a model in one piece": (True, True), "the first stage": (True, False), "the last stage": (False, True)}
    for name, (first, last) in stages.items():
        with trial.case(name):
            answer = trial.call(first, last, None, args=args, build=synthetic_training.Stage)
            if not isinstance(answer, torch.nn.Module):
                raise WrongAnswer(f"must return a model, not {type(answer).__name__}")
            if not isinstance(answer, synthetic_training.Stage):
                raise WrongAnswer("must return the model that build(pre_process, post_process, vp_stage) made")


CUSTOM_MEGATRON_INIT = Contract(
    flag="--custom-megatron-init-path",
    side="training",
    purpose="Sets up what a rank of the trainer needs: switches of torch, a profiler, process groups of your own.",
    when="Once on every rank, when Megatron's process groups stand and before the model is built.",
    arguments=("args",),
    returns="Nothing.",
    trial=_try_init,
    example="examples.plugins.training:exact_products",
)

CUSTOM_MODEL_PROVIDER = Contract(
    flag="--custom-model-provider-path",
    side="training",
    purpose="Changes the model before it is wrapped for training: freezes parts, replaces modules without parameters, "
    "registers forward hooks.",
    when="Once on every rank for each chunk of the model, before weights are loaded. vp_stage is None without virtual "
    "pipeline stages.",
    arguments=("pre_process", "post_process", "vp_stage"),
    optional=("args", "build"),
    returns="The model that build(pre_process, post_process, vp_stage) makes, changed. Its parameters must keep their "
    "names and shapes, by which weights are loaded and synced.",
    trial=_try_model_provider,
    example="examples.plugins.training:without_embedding",
)

CUSTOM_MEGATRON_BEFORE_LOG_PROB = Contract(
    flag="--custom-megatron-before-log-prob-hook-path",
    side="training",
    purpose="Prepares the model for a pass without gradients.",
    when="On every rank before each such pass of the actor over a rollout; store_prefix says whose weights it has: "
    '"ref_" for the reference, "teacher_" for the teacher of --opd-type megatron, and "" for the policy itself. The '
    "results are ref_log_probs, teacher_log_probs and log_probs. model is a list of chunks.",
    arguments=("args", "model", "store_prefix"),
    returns="Nothing.",
    trial=_try_before_log_probs,
    example="examples.plugins.training:note_pass",
)

ROLLOUT_DATA_POSTPROCESS = Contract(
    flag="--rollout-data-postprocess-path",
    side="training",
    purpose="Changes advantages, log-probs or loss masks of a rollout before it is trained on.",
    when="Once a rollout on every rank of the actor, after log-probs and advantages, before the first step. Ranks of "
    "other pipeline stages than the last know neither of the two. Ranks that share samples (tensor and context "
    "parallel) must come to the same result.",
    arguments=("args", "rollout_id", "rollout_data"),
    returns=f"Nothing; it changes rollout_data in place. Read again are {', '.join(READ_BACK)}.",
    trial=_try_postprocess,
    example="examples.plugins.training:bounded_advantages",
)

CUSTOM_MEGATRON_BEFORE_TRAIN_STEP = Contract(
    flag="--custom-megatron-before-train-step-hook-path",
    side="training",
    purpose="Acts before an optimizer step: changes learning rates, watches weights.",
    when="On every rank before each step; step_id counts from 0 within the rollout. model is a list of chunks.",
    arguments=("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    returns="Nothing.",
    trial=_try_before_step,
    example="examples.plugins.training:gentle_start",
)

CONTRACTS = (
    CUSTOM_MEGATRON_INIT,
    CUSTOM_MODEL_PROVIDER,
    CUSTOM_MEGATRON_BEFORE_LOG_PROB,
    ROLLOUT_DATA_POSTPROCESS,
    CUSTOM_MEGATRON_BEFORE_TRAIN_STEP,
)
