"""Contracts of the functions that run in the driver: where prompts come from, how answers are made, graded and told."""

from __future__ import annotations

from vime.plugins import rollout_trials as trials
from vime.plugins.contract import Contract
from vime.plugins.train_data import OPTIONAL, REQUIRED

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
    trial=trials.try_data_source,
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
    trial=trials.try_rollout,
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
    returns="{name: {rewards, by_prompt, truncated, samples}}, or an object that has it as data, and perhaps metrics. "
    "rewards alone will do; by_prompt, a list with the rewards of each prompt's answers, makes confidence intervals "
    "and pass@k; samples, which have a status, are saved.",
    trial=trials.try_evaluation,
    example="examples.plugins.rollout:evaluate",
)

CUSTOM_GENERATE = Contract(
    flag="--custom-generate-function-path",
    side="rollout",
    purpose="Generates one sample within our sampling loop: tools, several turns, agents. For these "
    "`vime.rollout.multi_turn` does most of the work: docs/en/advanced/agents.md.",
    when="Once a sample, many at a time, up to the limit of concurrent requests.",
    arguments=("args", "sample", "sampling_params"),
    optional=("evaluation",),
    is_async=True,
    returns="The sample, with tokens (prompt and response), response_length, response and status; loss_mask where "
    "tokens are not the model's own; rollout_log_probs and weight_versions where they are known. Or a list of such "
    "samples, copies of the one that it got: its children, which are graded one by one, share one denominator in the "
    "loss and one entry in the baseline of their group.",
    trial=trials.try_generate,
    example="examples.plugins.generate:think_twice",
)

ROLLOUT_SAMPLE_HOOK = Contract(
    flag="--rollout-sample-hook",
    side="rollout",
    purpose="Looks at each generated sample, or changes it: masks parts of the response, adds metadata, writes a "
    "trace. The flag may name several functions, which are called one after the other.",
    when="Once a sample, after generation and before grading, in training and in evaluation; once more, on the sample "
    "as it was generated, after a rollout that did not wait for it.",
    arguments=("args", "sample"),
    keywords=("rollout_id", "evaluation"),
    is_async=None,
    returns="The sample, or nothing if it was changed in place.",
    trial=trials.try_sample_hook,
    example="examples.plugins.filters:mask_first_token",
)

CUSTOM_RM = Contract(
    flag="--custom-rm-path",
    side="rollout",
    purpose="Grades an answer.",
    when="Once a sample, as soon as it is generated; with --group-rm once a group, with the list of its samples, all "
    "that a generate function made of one among them. It has --rm-timeout-s for each sample.",
    arguments=("args", "sample"),
    optional=("evaluation",),
    is_async=True,
    returns="A finite number, or a dict of which --reward-key names the one to train on; with --group-rm a list of "
    "those, one a sample (`best_of_group` in examples/plugins/rewards.py).",
    trial=trials.try_reward,
    example="examples.plugins.rewards:exact_and_short",
)

DYNAMIC_SAMPLING_FILTER = Contract(
    flag="--dynamic-sampling-filter-path",
    side="rollout",
    purpose="Says whether a group counts; a group that does not is replaced by a new one.",
    when="Once a group, as soon as all its samples are graded; once more after a resume from a checkpoint in which the "
    "group waited for its training.",
    arguments=("args", "samples"),
    returns="True or False, or an object with keep, and perhaps reason (drops are counted by it) and "
    "keep_when_insufficient (whether the group may fill the batch when too few are kept).",
    trial=trials.try_dynamic_filter,
    example="examples.plugins.filters:rewards_differ",
)

BUFFER_FILTER = Contract(
    flag="--buffer-filter-path",
    side="rollout",
    purpose="Chooses which waiting groups of earlier rollouts (interrupted ones, and surplus ones that are finished) "
    "are taken first. Without it those that have waited longest.",
    when="Whenever groups are drawn while some wait in the buffer. rollout_id is None: groups may be drawn for "
    "several rollouts.",
    arguments=("args", "rollout_id", "buffer", "num_samples"),
    returns="At most num_samples groups, which it has removed from buffer.",
    trial=trials.try_buffer_filter,
    example="examples.plugins.filters:longest_first",
)

ROLLOUT_SAMPLE_FILTER = Contract(
    flag="--rollout-sample-filter-path",
    side="rollout",
    purpose="Takes samples out of the loss. A removed sample still counts in its group's baseline and in the "
    "denominator.",
    when="Once a rollout, on all groups together, after grading.",
    arguments=("args", "groups"),
    returns="Nothing; it sets remove_sample = True on samples.",
    trial=trials.try_sample_filter,
    example="examples.plugins.filters:remove_repetitions",
)

ROLLOUT_ALL_SAMPLES_PROCESS = Contract(
    flag="--rollout-all-samples-process-path",
    side="rollout",
    purpose="Sees every group that was finished, also those that a filter dropped: to keep them, or to steer the data "
    "source.",
    when="Once a rollout, after the sample filter. The groups stand in the order of their prompts.",
    arguments=("args", "all_samples", "data_source"),
    returns="Nothing.",
    trial=trials.try_all_samples,
    example="examples.plugins.filters:keep_solved",
)

CUSTOM_ROLLOUT_LOG = Contract(
    flag="--custom-rollout-log-function-path",
    side="rollout",
    purpose="Logs a rollout.",
    when="Once a rollout, after grading. rollout_extra_metrics are the metrics that we would log, rollout_time is in "
    "seconds.",
    arguments=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    returns="True to replace our log of the rollout; else ours follows.",
    trial=trials.try_rollout_log,
    example="examples.plugins.logs:log_rollout",
)

CUSTOM_EVAL_ROLLOUT_LOG = Contract(
    flag="--custom-eval-rollout-log-function-path",
    side="rollout",
    purpose="Logs an evaluation.",
    when="After each evaluation.",
    arguments=("rollout_id", "args", "data", "extra_metrics"),
    returns="True to replace our log of the evaluation; else ours follows.",
    trial=trials.try_eval_log,
    example="examples.plugins.logs:log_evaluation",
)

CUSTOM_REWARD_POST_PROCESS = Contract(
    flag="--custom-reward-post-process-path",
    side="rollout",
    purpose="Turns rewards into what advantages are made from, instead of the normalisation of the estimator.",
    when="Once a rollout, on all samples that have a reward.",
    arguments=("args", "samples"),
    returns="(raw rewards, rewards), two lists of finite numbers, as long as samples.",
    trial=trials.try_post_process,
    example="examples.plugins.rewards:rank_in_group",
)

CUSTOM_CONVERT_SAMPLES = Contract(
    flag="--custom-convert-samples-to-train-data-path",
    side="rollout",
    purpose="Makes the rows that are trained on, instead of one from each sample. It also takes the place of reward "
    "normalisation and post-processing.",
    when="Once a rollout, on all its samples in the order of their indices, ungraded ones too.",
    arguments=("args", "samples"),
    returns="A dict of lists with one entry a row, as many rows as a multiple of --global-batch-size: "
    f"{', '.join(REQUIRED)}, and perhaps {', '.join(OPTIONAL)}. What is left out is as the sample in that place has "
    "it; of loss_masks and rollout_log_probs only if the response is its own, of rollout_routed_experts only if all "
    "tokens are. A row without a mask is not trained on "
    "where the sample was removed or has no reward.",
    trial=trials.try_convert,
    example="examples.plugins.rewards:centred_rows",
)

CUSTOM_UPDATE_WEIGHT_POST_WRITE = Contract(
    flag="--custom-update-weight-post-write-path",
    side="rollout",
    purpose="Takes a version of the weights from the disk to where the engines read it.",
    when="After each version was written to a folder, before engines load it, with --update-weight-transport disk. "
    "rollout_engines are the addresses of the engines. Not again for an engine that is restarted later.",
    arguments=("args", "version_dir", "rollout_engines"),
    is_async=None,
    returns="Nothing.",
    trial=trials.try_post_write,
    example="examples.plugins.weights:list_files",
)

CONTRACTS = (
    DATA_SOURCE,
    ROLLOUT_FUNCTION,
    EVAL_FUNCTION,
    CUSTOM_GENERATE,
    ROLLOUT_SAMPLE_HOOK,
    CUSTOM_RM,
    DYNAMIC_SAMPLING_FILTER,
    BUFFER_FILTER,
    ROLLOUT_SAMPLE_FILTER,
    ROLLOUT_ALL_SAMPLES_PROCESS,
    CUSTOM_ROLLOUT_LOG,
    CUSTOM_EVAL_ROLLOUT_LOG,
    CUSTOM_REWARD_POST_PROCESS,
    CUSTOM_CONVERT_SAMPLES,
    CUSTOM_UPDATE_WEIGHT_POST_WRITE,
)
