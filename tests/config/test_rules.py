"""Every rule, its exact message, and that none hides another."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

from vime.algorithms import advantages
from vime.checkpoints import CheckpointStore
from vime.config import parse_config, resolve
from vime.config.rules.batches import nearest_divisors
from vime.config.sections.reward import RM_TYPES


def said(words: list[str]) -> tuple[str, ...]:
    return resolve(words).violations


RULES = {
    # the arithmetic of batches
    "--global-batch-size 24": (
        "--rollout-batch-size 8 x --n-samples-per-prompt 4 = 32 samples a rollout, but 32 = 24 x steps has no whole "
        "solution; --global-batch-size could be 8, 16 or 32"
    ),
    "--rollout-batch-size 5 --n-samples-per-prompt 3 --num-steps-per-rollout 2": (
        "--rollout-batch-size 5 x --n-samples-per-prompt 3 = 15 samples a rollout, but 15 = global-batch-size x 2 has "
        "no whole solution; --num-steps-per-rollout could be 1, 3 or 5"
    ),
    "--global-batch-size 16 --num-steps-per-rollout 4": (
        "--rollout-batch-size 8 x --n-samples-per-prompt 4 = 32 samples a rollout, but --global-batch-size 16 x "
        "--num-steps-per-rollout 4 = 64; give only one of the two, the other follows"
    ),
    "--actor-num-gpus-per-node 6": (
        "--global-batch-size 32 must be a multiple of --micro-batch-size 1 x 6 data-parallel ranks = 6; or pack by "
        "--use-dynamic-batch-size"
    ),
    "--micro-batch-size 5": (
        "--global-batch-size 32 must be a multiple of --micro-batch-size 5 x 1 data-parallel ranks = 5; or pack by "
        "--use-dynamic-batch-size"
    ),
    "--actor-num-gpus-per-node 8 --global-batch-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 99": (
        "--global-batch-size 4 must be a multiple of the 8 data-parallel ranks (8 training slots / 1)"
    ),
    # the layer for multi-token prediction
    "--enable-mtp-training": "--enable-mtp-training needs --mtp-num-layers 1: the layer to train",
    "--mtp-num-layers 2": "--mtp-num-layers 2: only a single layer, 1, can be part of the model",
    "--mtp-num-layers 1": (
        "--mtp-num-layers 1: the model has no such layer: {model}/config.json has no num_nextn_predict_layers"
    ),
    "--mtp-loss-scaling-factor -1": "--mtp-loss-scaling-factor must be at least 0, not -1.0",
    # experts
    "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss": (
        "--moe-router-load-balancing-type seq_aux_loss with --moe-aux-loss-coeff 0.01: only aux_loss balances packed "
        "samples"
    ),
    # numbers
    "--rollout-temperature 0": (
        "--rollout-temperature must be above 0, not 0.0 (log-probs are divided by it; --eval-temperature 0 evaluates "
        "greedily)"
    ),
    "--rollout-max-response-len 0": "--rollout-max-response-len must be at least 1, not 0",
    "--n-samples-per-prompt 0": "--n-samples-per-prompt must be at least 1, not 0",
    "--rollout-top-p 0": "--rollout-top-p must be above 0 and at most 1, not 0.0",
    "--rollout-top-k 0": "--rollout-top-k must be at least 1, or -1 for all tokens, not 0",
    "--vllm-dtype half": "--vllm-dtype half must be bfloat16, in which the trainer computes; --fp16 is for both",
    "--vllm-dtype bfloat16 --fp16": (
        "--vllm-dtype bfloat16 must be float16, in which the trainer computes; --bf16 is for both"
    ),
    "--vllm-dtype auto": "--vllm-dtype auto must be bfloat16, in which the trainer computes",
    "--vllm-api-server-count 0": "--vllm-api-server-count must be at least 1, not 0",
    "--eval-temperature -1": "--eval-temperature must be at least 0, not -1.0",
    # estimators
    "--kl-coef 0.1 --ref-load {model}": (
        "--kl-coef 0.1 has no place in the rewards of grpo: use --use-kl-loss with --kl-loss-coef, or "
        "--advantage-estimator {kl_estimators}"
    ),
    "--advantage-estimator reinforce_plus_plus": (
        "--advantage-estimator reinforce_plus_plus needs --normalize-advantages: its advantages have no scale of their "
        "own"
    ),
    "--use-dr-grpo --calculate-per-token-loss": (
        "--use-dr-grpo and --calculate-per-token-loss exclude each other: each has its own denominator"
    ),
    "--dr-grpo-divisor 100": "--dr-grpo-divisor needs --use-dr-grpo",
    "--overlong-penalty-factor 2": "--overlong-penalty-factor needs --overlong-buffer-len",
    "--overlong-buffer-len 65": "--overlong-buffer-len 65 is more than --rollout-max-response-len 64",
    "--overlong-buffer-len 0": "--overlong-buffer-len must be at least 1, not 0",
    "--advantage-estimator reinforce_plus_plus --normalize-advantages --exclude-zero-signal-groups": (
        "--exclude-zero-signal-groups has no meaning with reinforce_plus_plus: it learns from groups of equal rewards "
        "too"
    ),
    "--ref-update-interval 2": "--ref-update-interval needs a reference model: give --use-kl-loss or --kl-coef",
    "--use-unbiased-kl": "--use-unbiased-kl needs --use-kl-loss",
    "--custom-tis-function-path examples.plugins.losses:clipped_weights": (
        "--custom-tis-function-path needs --use-tis"
    ),
    "--custom-pg-loss-reducer-function-path examples.plugins.losses:constant_length --use-dr-grpo": (
        "--custom-pg-loss-reducer-function-path and --use-dr-grpo exclude each other"
    ),
    "--loss-type custom_loss": "--loss-type custom_loss needs --custom-loss-function-path",
    "--custom-loss-function-path examples.plugins.losses:reinforce": (
        "--custom-loss-function-path needs --loss-type custom_loss"
    ),
    # off-policy corrections
    "--use-tis --use-rollout-logprobs": (
        "--use-tis and --use-rollout-logprobs exclude each other: the engine's log-probs are the old ones"
    ),
    "--keep-old-actor --use-rollout-logprobs": (
        "--keep-old-actor and --use-rollout-logprobs exclude each other: the engine's log-probs are the old ones"
    ),
    "--tis-clip 3": "--tis-clip needs --use-tis",
    "--tis-level sequence": "--tis-level needs --use-tis",
    "--tis-batch-normalize": "--tis-batch-normalize needs --use-tis",
    "--opsm-delta 0.1": "--opsm-delta needs --use-opsm",
    "--use-tis --tis-clip-low 3": "--tis-clip-low 3 is above --tis-clip 2",
    "--use-tis --tis-mode truncate --tis-clip-low 0.5": (
        "--tis-clip-low 0.5 has no meaning with --tis-mode truncate; clip cuts both ways"
    ),
    "--use-tis --rollout-top-p 0.9": (
        "--use-tis compares log-probs of trainer and engine, which --rollout-top-p 0.9 makes different things: 1 is "
        "needed"
    ),
    "--use-rollout-logprobs --rollout-top-k 5": (
        "--use-rollout-logprobs compares log-probs of trainer and engine, which --rollout-top-k 5 makes different "
        "things: -1 is needed"
    ),
    "--gamma 1.5": "--gamma must be at least 0 and at most 1, not 1.5",
    "--eps-clip 1": "--eps-clip must be at least 0 and below 1, not 1.0",
    "--eps-clip-c 1": "--eps-clip-c must be above 1, not 1.0 (it bounds the ratio of negative advantages)",
    "--adam-beta2 1": "--adam-beta2 must be at least 0 and below 1, not 1.0",
    "--rm-timeout-s 0": "--rm-timeout-s must be above 0, not 0.0",
    "--vllm-router-port 70000": "--vllm-router-port must be at least 1 and at most 65535, not 70000 (it is a port)",
    "--lr 1e-6 --min-lr 1e-5": "--min-lr 1e-05 is above --lr 1e-06",
    # pieces of a pipeline rank
    "--num-layers-per-virtual-pipeline-stage 0": "--num-layers-per-virtual-pipeline-stage must be at least 1, not 0",
    # flags that need others
    "--use-dynamic-batch-size": "--use-dynamic-batch-size needs --max-tokens-per-gpu: how much to pack together",
    "--vllm-router-ip 127.0.0.1": "--vllm-router-ip needs --vllm-router-port",
    "--eval-interval 2": "--eval-interval needs --eval-prompt-data NAME FILE: what to evaluate on",
    "--num-rollout 0": "--num-rollout 0 only evaluates: give --eval-interval and --eval-prompt-data",
    "--rm-type remote_rm": "--rm-type remote_rm needs --rm-url: the address of the reward service",
    "--group-rm": "--group-rm needs --custom-rm-path: only a custom function can grade a whole group",
    "--no-colocate": "--rollout-num-gpus is required without --colocate: how many slots the engines get",
    "--recompute-granularity full": (
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers, e.g. uniform and 1"
    ),
    "--recompute-method uniform": "--recompute-method needs --recompute-granularity full",
    "--recompute-granularity selective --recompute-num-layers 1": (
        "--recompute-num-layers needs --recompute-granularity full"
    ),
    "--recompute-modules mlp": "--recompute-modules needs --recompute-granularity selective",
    "--overlap-param-gather": "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    "--overlap-param-gather --overlap-grad-reduce": "--overlap-param-gather needs --use-distributed-optimizer",
    "--hidden-dropout 0.1": "--hidden-dropout 0.1 cannot be given: vime needs 0.0 there",
    "--attention-dropout 0.1": "--attention-dropout 0.1 cannot be given: vime needs 0.0 there",
    "--moe-token-dispatcher-type allgather": (
        "--moe-token-dispatcher-type allgather cannot be given: vime needs alltoall there"
    ),
    "--no-attention-softmax-in-fp32": "--attention-softmax-in-fp32 False cannot be given: vime needs True there",
    "--no-grad-reduce-in-fp32": "--grad-reduce-in-fp32 False cannot be given: vime needs True there",
    "--moe-router-dtype fp64": "--moe-router-dtype fp64 cannot be given: vime needs fp32 there",
    "--fp8 hybrid": "--fp8 hybrid needs --transformer-impl transformer_engine: other layers ignore it",
    "--fp4-param": "--fp4-param needs --transformer-impl transformer_engine: other layers ignore it",
    "--actor-num-gpus-per-node 2 --context-parallel-size 2 --transformer-impl transformer_engine": (
        "--context-parallel-size 2 needs --transformer-impl local: Transformer Engine cuts otherwise"
    ),
    "--fp32 --gradient-accumulation-fusion": (
        "--gradient-accumulation-fusion needs --bf16 or --fp16: with --fp32 there is nothing to widen"
    ),
    "--fp16 --fp32": "exactly one of --bf16, --fp16 and --fp32 must hold, not --fp16 and --fp32",
    "--bf16 --fp32": "exactly one of --bf16, --fp16 and --fp32 must hold, not --bf16 and --fp32",
    "--no-bf16": "exactly one of --bf16, --fp16 and --fp32 must hold, not none",
    "--lr-warmup-iters 2 --lr-warmup-fraction 0.1": "--lr-warmup-fraction and --lr-warmup-iters exclude each other",
    # slots
    "--no-colocate --rollout-num-gpus 5 --rollout-num-gpus-per-engine 2": (
        "--rollout-num-gpus 5 must be a multiple of --rollout-num-gpus-per-engine 2, e.g. 4 or 6"
    ),
    "--rollout-num-gpus-per-engine 2": (
        "training slots under --colocate 1 must be a multiple of --rollout-num-gpus-per-engine 2, e.g. 2"
    ),
    "--no-colocate --rollout-num-gpus 0": (
        "--rollout-num-gpus 0 leaves no engine; only --debug-train-only runs without"
    ),
    "--no-colocate --rollout-num-gpus 6 --rollout-num-gpus-per-engine 6 --num-gpus-per-node 4": (
        "--rollout-num-gpus-per-engine 6 is more than a node has (--num-gpus-per-node 4): this version runs an engine "
        "on one node"
    ),
    "--rollout-num-gpus-per-engine 4 --actor-num-gpus-per-node 4": (
        "--rollout-num-gpus-per-engine 4 does not divide the model's 6 attention heads; nearest that work: 1 or 2"
    ),
    "--actor-num-gpus-per-node 16": ("--actor-num-gpus-per-node 16 is more than a node has (--num-gpus-per-node 8)"),
    # what this version cannot do yet
    "--attention-backend flash": "--attention-backend flash is not yet supported by this version (only auto is)",
    # the reference model
    "--use-kl-loss": "--use-kl-loss needs a reference model: give --ref-load (--ref-load {model} will do)",
    "--kl-loss-coef 0.1 --ref-load {model}": "--kl-loss-coef 0.1 needs --use-kl-loss",
    "--use-kl-loss --ref-load {tmp}/none": "--ref-load {tmp}/none: no such folder",
    "--use-kl-loss --ref-load {tmp}": (
        "--ref-load {tmp}: neither a checkpoint (latest_checkpointed_iteration.txt) nor a Hugging Face folder "
        "(config.json)"
    ),
    # files
    "--prompt-data {tmp}/none.jsonl": "--prompt-data {tmp}/none.jsonl: no such file",
    "--prompt-data {tmp}/none.jsonl@[-:-]": (
        "--prompt-data {tmp}/none.jsonl@[-:-]: a slice is FILE@[a:b], with whole numbers of up to 18 digits or none"
    ),
    "--prompt-data {tmp}/none.parquet": "--prompt-data {tmp}/none.parquet: only .jsonl files are read",
    "--eval-interval 1 --eval-prompt-data aime {tmp}/none.jsonl": (
        "--eval-prompt-data aime {tmp}/none.jsonl: no such file"
    ),
    "--hf-checkpoint {tmp}/none": (
        "--hf-checkpoint {tmp}/none: no such folder (it must be a local one; `hf download` makes it)"
    ),
    "--load {tmp}/iter_0000004": ("--load {tmp}/iter_0000004: give the root {tmp}, and --ckpt-step to pick a step"),
    "--save-hf {tmp}/hf": "--save-hf {tmp}/hf: it must contain {{rollout_id}}, which becomes the rollout's number",
    # lengths
    "--rollout-max-prompt-len 1024": (
        "--rollout-max-prompt-len 1024 must be at most 1023: the model's context is 1024, with one token to answer"
    ),
    "--vllm-max-model-len 256 --rollout-max-prompt-len 256": (
        "--rollout-max-prompt-len 256 must be at most 255: --vllm-max-model-len is 256, with one token to answer"
    ),
    "--rollout-max-context-len 200 --rollout-max-prompt-len 200": (
        "--rollout-max-prompt-len 200 must be at most 199: the longest context is 200, with one token to answer"
    ),
    "--eval-max-context-len 2000": "--eval-max-context-len 2000 is more than the model's context, which is 1024",
    "--rollout-max-context-len 2000": "--rollout-max-context-len 2000 is more than the model's context, which is 1024",
}


@pytest.mark.parametrize(("words", "message"), RULES.items())
def test_the_message_of_a_rule(flags, model_dir, tmp_path, words, message):
    places = {"model": model_dir, "tmp": tmp_path, "rollout_id": "{rollout_id}"}
    places["kl_estimators"] = ", ".join(name for name in advantages.names() if advantages.get(name).takes_kl)
    extra = [word.format(**places) for word in words.split()]
    lines = said(flags(*extra))
    if "not yet supported" not in message:  # such a line may stand beside the one that this is about
        lines = tuple(line for line in lines if "not yet supported" not in line)
    assert lines == (message.format(**places),)


def test_flags_may_repeat_what_vime_gives_megatron(flags):
    words = "--hidden-dropout 0 --attention-dropout 0.0 --moe-token-dispatcher-type alltoall --moe-router-dtype fp32"
    assert said(flags(*words.split(), "--accumulate-allreduce-grads-in-fp32")) == ()


def test_messages_of_interleaved_pipelines_are_not_sent_in_batches(flags, model_dir):
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4}))
    words = ["--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2", "--batch-p2p-comm"]
    assert said(flags(*words)) == ()
    lines = said(flags(*words, "--virtual-pipeline-model-parallel-size", "2"))
    assert lines == ("--batch-p2p-comm True cannot be given: vime needs False there",)


def test_evaluation_file(flags, tmp_path):
    path = tmp_path / "eval.yaml"
    path.write_text("eval:\n  datasets:\n    - name: a\n")
    (message,) = said(flags("--eval-interval", "1", "--eval-config", str(path)))
    assert message == f"--eval-config {path}: eval.datasets[0]: path is missing"


def test_a_grader_whose_package_is_missing_is_told_before_anything_starts(flags, monkeypatch, tmp_path, prompt_file):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "if_verifiable" else found(name))
    missing = 'needs the package if-verifiable, which is not installed: pip install "vime[ifbench]"'
    assert said(flags("--rm-type", "ifbench", "--label-key", "")) == (f"--rm-type ifbench {missing}",)
    path = tmp_path / "eval.yaml"
    path.write_text(f"eval: {{datasets: [{{name: a, path: {prompt_file}, rm_type: ifbench, label_key: null}}]}}\n")
    assert said(flags("--eval-interval", "1", "--eval-config", str(path))) == (
        f"--eval-config {path}: a: rm_type ifbench {missing}",
    )


def test_a_run_of_evaluations_alone_leaves_the_first_not_out(flags, prompt_file):
    words = ["--num-rollout", "0", "--eval-interval", "1", "--eval-prompt-data", "a", str(prompt_file)]
    assert said(flags(*words)) == ()
    assert said(flags(*words, "--skip-eval-before-train")) == (
        "--num-rollout 0 only evaluates: leave --skip-eval-before-train out",
    )


WRONG_SETS = {
    "temperatur: 1": "eval.datasets[0]: temperatur is unknown; did you mean temperature?",
    "temperature: warm": "eval.datasets[0]: temperature expects a number, not 'warm'",
    "max_response_len: 1.5": "eval.datasets[0]: max_response_len expects a whole number, not 1.5",
    "max_response_len: null": "eval.datasets[0]: max_response_len expects a whole number, not None",
    "rm_type: maths": f"eval.datasets[0]: rm_type expects one of {', '.join(RM_TYPES)}, not 'maths'",
    "stop: {a: b}": "eval.datasets[0]: stop expects one or more values, each a text, not {'a': 'b'}",
    "metadata_overrides: [1]": "eval.datasets[0]: metadata_overrides expects a JSON object, e.g. '{\"key\": 1}', "
    "not [1]",
    "rm_type: math, custom_rm_path: a.b": "eval.datasets[0]: rm_type has no effect beside custom_rm_path, which grades "
    "every answer",
    "temperature: -1": "a: temperature must be at least 0, not -1.0",
    "n_samples_per_eval_prompt: 0": "a: n_samples_per_eval_prompt must be at least 1, not 0",
    "top_k: 0": "a: top_k must be at least 1, or -1 for all tokens, not 0",
    "rm_type: remote_rm": "a: rm_type remote_rm needs --rm-url: the address of the reward service",
    "rm_type: math, group_rm: true": "a: group_rm needs custom_rm_path: only a custom function can grade a whole group",
    "rm_type: math, label_key: null": "a: rm_type math compares with a label: give label_key",
}


@pytest.mark.parametrize("entry", list(WRONG_SETS))
def test_what_a_set_of_the_evaluation_file_says_is_checked(flags, tmp_path, prompt_file, entry):
    path = tmp_path / "eval.yaml"
    path.write_text(f"eval:\n  datasets:\n    - {{name: a, path: {prompt_file}, {entry}}}\n")
    assert said(flags("--eval-interval", "1", "--eval-config", str(path))) == (
        f"--eval-config {path}: {WRONG_SETS[entry]}",
    )


def test_files_of_the_evaluation_file(flags, tmp_path, prompt_file):
    path = tmp_path / "eval.yaml"
    path.write_text(f"eval:\n  datasets:\n    - {{name: a, path: {prompt_file}}}\n    - {{name: b, path: b.jsonl}}\n")
    (message,) = said(flags("--eval-interval", "1", "--eval-config", str(path)))
    assert message == f"--eval-config {path}: b b.jsonl: no such file"


def test_debugging_only_one_side(flags):
    alone = "--debug-train-only needs --load-debug-rollout-data: what to train on"
    assert alone in said(flags("--debug-train-only"))
    both = "--debug-rollout-only and --load-debug-rollout-data exclude each other"
    assert both in said(flags("--debug-rollout-only", "--load-debug-rollout-data", "{rollout_id}"))


def without_save(words: list[str]) -> list[str]:
    position = words.index("--save")
    return [*words[:position], *words[position + 2 :]]


def test_saved_rollouts_need_no_prompts_and_no_engines(flags):
    words = without_save(flags("--load-debug-rollout-data", "{rollout_id}.json"))
    resolution = resolve(words)
    assert (resolution.violations, resolution.warnings) == ((), ())
    assert resolution.config.cluster.rollout_num_gpus == 0 and not resolution.config.has_engines
    position = words.index("--prompt-data")
    assert said([*words[:position], *words[position + 2 :]]) == ()


def test_what_saved_rollouts_exclude(flags):
    load = ("--load-debug-rollout-data", "{rollout_id}.json")
    assert said(flags(*load)) == (
        "--save and --load-debug-rollout-data exclude each other: prompts stand still, so no run could go on from such "
        "a checkpoint (--run-dir says where metrics go)",
    )
    assert said(without_save(flags(*load, "--advantage-estimator", "ppo"))) == (
        "--load-debug-rollout-data trains no critic: --advantage-estimator ppo needs one",
    )
    assert "--load-debug-rollout-data needs --num-rollout: how many were saved" in said(
        without_save(flags(*load, "--num-rollout", "0"))
    )
    words = without_save(flags(*load, "--rollout-num-gpus", "2", "--save-debug-rollout-data", "{rollout_id}"))
    assert resolve(words).warnings == (
        "--rollout-num-gpus 2 is ignored by --load-debug-rollout-data: no engine is started",
        "--save-debug-rollout-data has no effect with --load-debug-rollout-data: nothing is sampled",
    )


def test_fine_tuning_needs_its_dialogues_whatever_it_leaves_out(flags):
    words = flags("--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--debug-train-only")
    position = words.index("--prompt-data")
    assert said([*words[:position], *words[position + 2 :]]) == (
        "--prompt-data is required (or --data-source-path): where the prompts come from",
    )


def test_what_this_version_cannot_do_is_refused_even_where_the_flag_is_known(flags):
    assert said(flags("--log-probs-max-tokens-per-gpu", "9", "--debug-rollout-only")) == (
        "--log-probs-max-tokens-per-gpu 9 is not yet supported by this version",
        "--debug-rollout-only is not yet supported by this version",
    )


def test_two_kinds_of_kl_exclude_each_other(flags, model_dir):
    words = f"--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2 --ref-load {model_dir}"
    expected = "--kl-coef 0.1 (in the reward) and --kl-loss-coef 0.2 (in the loss) exclude each other"
    assert expected in said(flags(*words.split()))


def test_nothing_given_says_all_that_is_required():
    assert said([]) == (
        "--hf-checkpoint is required (Hugging Face folder: gives the model's shape and tokenizer, and starts the "
        "engines. Need not be current)",
        "--rollout-batch-size is required (Prompts of one rollout)",
        "--rollout-max-response-len is required (Most tokens of one response)",
        "--num-rollout or --num-epoch is required: how long the run is",
        "--prompt-data is required (or --data-source-path): where the prompts come from",
        "--rollout-num-gpus is required without --colocate: how many slots the engines get",
        "--rm-type or --custom-rm-path is required: how answers are graded",
    )


def test_a_missing_model_hides_no_other_mistake(flags, tmp_path):
    assert said(flags("--hf-checkpoint", f"{tmp_path}/none", "--global-batch-size", "24", "--save-interval", "0")) == (
        "--save-interval must be at least 1, not 0",
        "--rollout-batch-size 8 x --n-samples-per-prompt 4 = 32 samples a rollout, but 32 = 24 x steps has no whole "
        "solution; --global-batch-size could be 8, 16 or 32",
        f"--hf-checkpoint {tmp_path}/none: no such folder (it must be a local one; `hf download` makes it)",
    )


def test_a_model_folder_needs_a_config_and_a_tokenizer(flags, model_dir):
    (model_dir / "config.json").unlink()
    (model_dir / "tokenizer.json").unlink()
    assert said(flags()) == (
        f"--hf-checkpoint {model_dir}: there is no config.json in it",
        f"--hf-checkpoint {model_dir}: there is no tokenizer in it "
        "(tokenizer.json, tokenizer.model, vocab.json, tekken.json)",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--save-interval 2", "--save-interval needs --save: the folder for checkpoints"),
        ("--save-hf hf/{rollout_id}", "--save-hf needs --save: it is written along with each checkpoint"),
    ],
)
def test_what_is_saved_needs_save(flags, words, message):
    words = flags(*words.split())
    position = words.index("--save")
    del words[position : position + 2]
    assert said(words) == (message,)


def test_labels_are_needed_by_graders_that_compare(flags):
    words = flags()
    position = words.index("--label-key")
    del words[position : position + 2]
    assert said(words) == ("--rm-type math compares with a label: give --label-key",)
    assert said([*words, "--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:1"]) == ()


def test_an_older_runs_folder_is_not_written_into_unless_it_is_resumed(flags, tmp_path):
    folder = tmp_path / "save"
    (folder / "iter_0000001").mkdir(parents=True)
    assert said(flags()) == (
        f"--save {folder}: the folder is not empty; resume from it by --load {folder}, or give another one",
    )
    assert said(flags("--load", str(folder))) == ()


@pytest.mark.parametrize(
    "left",
    ["logs/engine_0.log", "tensorboard/events", "run_config.json", ".vime.lock", "samples/rollout_0000000.jsonl"],
)
def test_what_a_failed_start_leaves_does_not_block_the_next_one(flags, tmp_path, left):
    file = tmp_path / "save" / left
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert said(flags()) == ()
    (tmp_path / "save" / "metrics.jsonl").write_text('{"rollout_id": 0, "step": 1}\n')
    assert [line.split(";")[0] for line in said(flags())] == [f"--save {tmp_path / 'save'}: the folder is not empty"]


def test_a_folder_to_resume_from_may_be_empty_only_where_the_run_saves_too(flags, tmp_path):
    later, save = tmp_path / "later", tmp_path / "save"
    own = "only the folder of --save itself may be empty at first"
    assert said(flags("--load", str(save))) == ()
    assert said(flags("--load", str(later))) == (f"--load {later}: no such folder; {own}",)
    later.mkdir()
    assert said(flags("--load", str(later))) == (
        f"--load {later}: there is no checkpoint in it, and it is no Hugging Face folder; {own}",
    )
    store = CheckpointStore(later)
    store.begin(0)
    store.commit(0, {})
    assert said(flags("--load", str(later))) == ()


def test_a_hugging_face_folder_can_be_loaded(flags, model_dir):
    assert said(flags("--load", str(model_dir))) == ()


@pytest.mark.parametrize(
    "flag",
    ["--save", "--hf-checkpoint", "--ref-load", "--prompt-data", "--critic-save", "--custom-config-path"],
)
def test_a_name_that_is_too_long_is_one_line(flags, tmp_path, flag):
    name = "n" * 300
    messages = said(flags(flag, str(tmp_path / name)))
    assert [message for message in messages if name in message]
    assert all("\n" not in message for message in messages)


def test_a_slice_of_a_prompt_file(flags, prompt_file):
    assert parse_config(flags("--prompt-data", f"{prompt_file}@[0:1]")).data.prompt_data == f"{prompt_file}@[0:1]"


def test_wandb_must_be_installed_to_be_used(flags, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert said(flags("--use-wandb")) == (
        '--use-wandb needs the package wandb, which is not installed: pip install "vime[wandb]"',
    )


@pytest.mark.parametrize(
    ("number", "wanted", "offer"),
    [(32, 24, "8, 16 or 32"), (15, 2, "1, 3 or 5"), (7, 3, "1 or 7"), (1, 5, "1"), (256, 100, "32, 64 or 128")],
)
def test_offered_divisors_are_the_nearest(number, wanted, offer):
    assert nearest_divisors(number, wanted) == offer


WARNINGS = {
    "--rollout-max-response-len 100000": (
        "--rollout-max-response-len 100000 cannot be reached: the model's context is 1024, with the prompt in it"
    ),
    "--rollout-max-response-len 64 --vllm-max-model-len 64": (
        "--rollout-max-response-len 64 cannot be reached: --vllm-max-model-len is 64, with the prompt in it"
    ),
    "--use-dynamic-batch-size --max-tokens-per-gpu 4": (
        "--max-tokens-per-gpu 4 holds less than a response of --rollout-max-response-len 64: longer samples are passed "
        "one by one, and take the memory that they need"
    ),
    "--moe-aux-loss-coeff 0.01 --use-dynamic-batch-size --max-tokens-per-gpu 99": (
        "--moe-aux-loss-coeff 0.01 balances the experts of each micro-batch: with --use-dynamic-batch-size its loss "
        "depends on what is packed together, and so on the parallel layout"
    ),
    "--n-samples-per-prompt 1": (
        "--n-samples-per-prompt 1 makes every advantage 0: a group of one is its own baseline; 8 is usual with grpo"
    ),
    "--advantage-estimator cispo --eps-clip-c 3": (
        "--eps-clip-c has no effect with cispo: --eps-clip-high bounds what a token weighs"
    ),
    "--use-opsm": (
        "--use-opsm has no effect with one step a rollout: the old policy is the current one; it needs "
        "--use-rollout-logprobs, --keep-old-actor or --num-steps-per-rollout above 1"
    ),
    "--gamma 0.9 --lambd 0.5": "--gamma, --lambd: no effect with --advantage-estimator grpo",
    "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9 --lambd 0.9": (
        "--lambd: no effect with --advantage-estimator reinforce_plus_plus"
    ),
    "--advantage-estimator ppo --use-dr-grpo --disable-grpo-std-normalization --disable-rewards-normalization": (
        "--disable-rewards-normalization, --disable-grpo-std-normalization: no effect with --advantage-estimator ppo"
    ),
    "--loss-type custom_loss --custom-loss-function-path examples.plugins.losses:reinforce --use-tis --eps-clip 0.1 "
    "--entropy-coef 0.1 --use-opsm --num-steps-per-rollout 2 --use-dr-grpo": (
        "--loss-type custom_loss is the whole loss; without effect unless --custom-loss-function-path reads them from "
        "args: --eps-clip, --entropy-coef, --use-dr-grpo, --use-tis, --use-opsm"
    ),
    "--rollout-top-p 0.9": (
        "--rollout-top-p 0.9: the engine samples from fewer tokens than the trainer computes log-probs over; 1 is "
        "right for training (evaluations are free)"
    ),
    "--rollout-top-k 50": (
        "--rollout-top-k 50: the engine samples from fewer tokens than the trainer computes log-probs over; -1 is "
        "right for training (evaluations are free)"
    ),
    "--use-kl-loss --ref-load {model}": (
        "--use-kl-loss with --kl-loss-coef 0 only reports the KL divergence, at the cost of the reference model's "
        "memory and one more forward pass; leave --use-kl-loss out to save both"
    ),
    "--eval-prompt-data a {prompts}": "--eval-prompt-data without --eval-interval: no evaluation will run",
    "--num-epoch 2": "--num-epoch 2 is ignored: --num-rollout wins",
    "--max-tokens-per-gpu 64": "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size",
    "--seq-length 4096": "--seq-length has no effect: samples are packed, and the model's own context counts",
    "--cp-comm-type a2a": "--cp-comm-type has no effect: context-parallel ranks gather keys and values",
    "--moe-use-legacy-grouped-gemm": (
        "--moe-use-legacy-grouped-gemm has no effect: vime multiplies by its experts in its own way"
    ),
    "--actor-num-nodes 2": (
        "--colocate with --actor-num-nodes 2: where they are several nodes with GPUs, the run ends once it has its "
        "slots, unless --update-weight-transport disk brings the weights to the engines"
    ),
    "--wandb-project p": "--wandb-project has no effect without --use-wandb",
}


CUSTOM_LOSS = "--loss-type custom_loss --custom-loss-function-path examples.plugins.losses:reinforce"
SOMETHING_TO_LEARN = "exclude each other: there is something to learn from groups of equal rewards too"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{CUSTOM_LOSS} --use-tis --custom-tis-function-path examples.plugins.losses:clipped_weights",
            "--custom-tis-function-path is never called with --loss-type custom_loss, which is the whole loss",
        ),
        (
            f"{CUSTOM_LOSS} --custom-pg-loss-reducer-function-path examples.plugins.losses:constant_length",
            "--custom-pg-loss-reducer-function-path is never called with --loss-type custom_loss, which is the whole "
            "loss",
        ),
        (
            f"{CUSTOM_LOSS} --advantage-estimator ppo --disable-compute-advantages-and-returns",
            "--disable-compute-advantages-and-returns leaves the critic of --advantage-estimator ppo without a use: "
            "give another estimator",
        ),
        ("--ckpt-step 5", "--ckpt-step 5 needs --load: the checkpoints to pick from"),
        ("--ref-ckpt-step 5", "--ref-ckpt-step 5 needs --ref-load: the checkpoints to pick from"),
        (
            "--ref-ckpt-step 5 --ref-load {model}",
            "--ref-ckpt-step 5: --ref-load {model} is a Hugging Face folder, which has no steps",
        ),
        (
            "--exclude-zero-signal-groups --disable-rewards-normalization",
            f"--exclude-zero-signal-groups and --disable-rewards-normalization {SOMETHING_TO_LEARN}",
        ),
        (
            "--exclude-zero-signal-groups --custom-advantage-function-path examples.plugins.losses:leave_one_out",
            f"--exclude-zero-signal-groups and --custom-advantage-function-path {SOMETHING_TO_LEARN}",
        ),
        (
            "--exclude-zero-signal-groups --advantage-estimator reinforce_plus_plus_baseline --normalize-advantages "
            "--kl-coef 0.1 --ref-load {model}",
            f"--exclude-zero-signal-groups and --kl-coef 0.1 {SOMETHING_TO_LEARN}",
        ),
    ],
)
def test_parts_that_would_be_ignored_or_wrong_are_refused(flags, model_dir, words, message):
    assert said(flags(*words.format(model=model_dir).split())) == (message.format(model=model_dir),)


@pytest.mark.parametrize(("words", "message"), WARNINGS.items())
def test_the_message_of_a_warning(flags, model_dir, prompt_file, words, message):
    places = {"model": model_dir, "prompts": prompt_file}
    resolution = resolve(flags(*[word.format(**places) for word in words.split()]))
    assert (resolution.violations, resolution.warnings) == ((), (message,))


@pytest.mark.parametrize(
    "words", ["--update-weight-transport disk --update-weight-disk-dir {folder}", "--no-colocate --rollout-num-gpus 2"]
)
def test_weights_can_reach_the_engines_of_several_nodes(flags, tmp_path, words):
    words = f"--actor-num-nodes 2 {words.format(folder=tmp_path / 'weights')}"
    resolution = resolve(flags(*words.split()))
    assert (resolution.violations, resolution.warnings) == ((), ())


def test_a_file_of_evaluations_without_an_interval_is_doubtful(flags, prompt_file, tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text(f"eval:\n  datasets:\n    - {{name: a, path: {prompt_file}}}\n")
    assert resolve(flags("--eval-config", str(file))).warnings == (
        "--eval-config without --eval-interval: no evaluation will run",
    )


def test_evaluation_may_sample_as_it_likes(flags, prompt_file):
    words = f"--eval-interval 1 --eval-prompt-data a {prompt_file} --eval-top-p 0.5 --eval-top-k 20"
    assert resolve(flags(*words.split())).warnings == ()


def test_a_run_without_save_keeps_nothing(flags):
    words = flags()
    position = words.index("--save")
    del words[position : position + 2]
    assert resolve(words).warnings == ("without --save nothing of the trained model is kept",)


def test_a_threshold_that_the_policy_of_the_router_does_not_read_is_told(flags):
    words = ("--router-balance-abs-threshold", "0")
    assert resolve(flags(*words)).warnings == (
        "--router-balance-abs-threshold has no effect with --router-policy consistent_hash: only cache_aware reads it",
    )
    assert resolve(flags(*words, "--router-policy", "cache_aware")).warnings == ()


WITH = {
    "--opd-teacher-load": ("--use-opd", "--opd-type", "megatron"),
    "--critic-load": ("--advantage-estimator", "ppo"),
}


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load", "--load", *WITH])
def test_a_folder_without_the_weights_that_a_run_starts_from_is_told(flags, model_dir, tmp_path, flag):
    empty = tmp_path / "empty"
    shutil.copytree(model_dir, empty)
    (empty / "model.safetensors").unlink()
    words = flags(flag, str(empty), *WITH.get(flag, ()))
    told = f"{flag} {empty}: neither model.safetensors nor model.safetensors.index.json is there; only safetensors can"
    assert any(line.startswith(told) for line in resolve(words).violations)


def test_engines_start_from_weights_too(flags, model_dir, tmp_path):
    empty = tmp_path / "empty"
    shutil.copytree(model_dir, empty)
    (empty / "model.safetensors").unlink()
    words = flags("--hf-checkpoint", str(empty), "--ref-load", str(model_dir))
    assert resolve(words).violations == (
        f"--hf-checkpoint {empty}: there are no weights in it, which the engines start from",
    )
    assert not resolve([*words, "--vllm-load-format", "dummy"]).violations
