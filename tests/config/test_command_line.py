"""How words become values."""

from __future__ import annotations

import pytest
import yaml

from vime.algorithms import advantages
from vime.config import parse_config, resolve
from vime.errors import UserError


def violations(words: list[str]) -> list[str]:
    return list(resolve(words).violations)


def only_violation(words: list[str]) -> str:
    (message,) = violations(words)
    return message


def test_the_flags_of_the_fixture_are_right_and_without_doubt(flags):
    resolution = resolve(flags())
    assert (resolution.violations, resolution.warnings) == ((), ())


def test_a_value_may_follow_an_equals_sign_or_a_space(flags):
    assert parse_config(flags("--lr", "2e-6")).optimizer.lr == 2e-6
    assert parse_config(flags("--lr=2e-6")).optimizer.lr == 2e-6


def test_a_value_may_contain_equals_signs_and_dashes(flags):
    config = parse_config(flags("--wandb-group=a=--b", "--use-wandb", "--wandb-mode", "offline"))
    assert config.ops.wandb_group == "a=--b"


def test_negative_numbers_are_values(flags):
    assert parse_config(flags("--rollout-top-k", "-1")).rollout.rollout_top_k == -1


def test_a_repeated_flag_wins_over_the_earlier_one(flags):
    assert parse_config(flags("--lr", "1", "--lr", "0.5")).optimizer.lr == 0.5


def test_switches_are_turned_on_by_name_and_off_by_no(flags):
    assert parse_config(flags("--rollout-shuffle")).data.rollout_shuffle is True
    assert parse_config(flags("--rollout-shuffle", "--no-rollout-shuffle")).data.rollout_shuffle is False
    assert parse_config(flags("--rollout-shuffle=false")).data.rollout_shuffle is False


def test_a_switch_whose_name_starts_with_no_is_negated_without_it(flags):
    assert parse_config(flags("--no-save-optim")).checkpoint.no_save_optim is True
    assert parse_config(flags("--no-save-optim", "--save-optim")).checkpoint.no_save_optim is False


def test_lists_take_all_words_up_to_the_next_flag(flags):
    config = parse_config(flags("--rollout-stop-token-ids", "1", "2", "3", "--rollout-stop", "END"))
    assert config.rollout.rollout_stop_token_ids == (1, 2, 3)
    assert config.rollout.rollout_stop == ("END",)


def test_json_values_are_objects(flags):
    config = parse_config(flags("--apply-chat-template-kwargs", '{"enable_thinking": false}'))
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_evaluation_sets_may_be_repeated_flags_or_flat_pairs(flags, prompt_file):
    path = str(prompt_file)
    repeated = flags("--eval-interval", "1", "--eval-prompt-data", "a", path, "--eval-prompt-data", "b", path)
    flat = flags("--eval-interval", "1", "--eval-prompt-data", "a", path, "b", path)
    expected = (("a", path), ("b", path))
    assert parse_config(repeated).evaluation.eval_prompt_data == expected
    assert parse_config(flat).evaluation.eval_prompt_data == expected


def test_an_odd_number_of_words_is_no_list_of_evaluation_sets(flags):
    assert only_violation(flags("--eval-prompt-data", "a", "b.jsonl", "c")) == (
        "--eval-prompt-data expects pairs of a name and a path, not 'a b.jsonl c'"
    )


def test_two_evaluation_sets_of_one_name_are_refused(flags, prompt_file):
    words = flags("--eval-interval", "1", "--eval-prompt-data", "a", str(prompt_file), "a", str(prompt_file))
    assert only_violation(words) == "--eval-prompt-data names 'a' 2 times; each data set needs its own name"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a b", "a/b"], "'a b' and 'a/b' would write the same files, eval_a_b_…; rename one of them"),
        (["a", "a-errors"], "'a-errors' would be the name of a metric of 'a' too; rename one of them"),
        (["a", "a-pass@4-ci95"], "'a-pass@4-ci95' would be the name of a metric of 'a' too; rename one of them"),
        (
            ["weight_version/min"],
            "'weight_version/min' would be the name of a metric of all sets too; rename it",
        ),
        (["n" * 260], f"{'n' * 40}… must have 1 to 200 bytes: it is part of the name of a file"),
    ],
)
def test_evaluation_sets_that_could_not_be_told_apart_are_refused(flags, prompt_file, tmp_path, names, message):
    given = [word for name in names for word in (name, str(prompt_file))]
    assert (
        only_violation(flags("--eval-interval", "1", "--eval-prompt-data", *given)) == f"--eval-prompt-data: {message}"
    )
    file = tmp_path / "eval.yaml"
    sets = [{"name": name, "path": str(prompt_file)} for name in names]
    file.write_text(yaml.safe_dump({"eval": {"datasets": sets}}, allow_unicode=True))
    assert (
        only_violation(flags("--eval-interval", "1", "--eval-config", str(file))) == f"evaluation data sets: {message}"
    )


def test_metadata_for_an_evaluation_set_must_be_such_as_samples_can_have(flags, prompt_file, tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text(f"eval:\n  datasets: [{{name: a, path: {prompt_file}, metadata_overrides: {{day: 2026-01-02}}}}]\n")
    assert only_violation(flags("--eval-interval", "1", "--eval-config", str(file))).endswith(
        "metadata_overrides['day'] is of type date; it must be what JSON can hold"
    )


def test_an_evaluation_set_may_end_like_a_metric_of_no_other(flags, prompt_file):
    words = flags("--eval-interval", "1", "--eval-prompt-data", "code-errors", str(prompt_file))
    assert parse_config(words).evaluation.eval_prompt_data == (("code-errors", str(prompt_file)),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--n-sample-per-prompt 4", "unknown flag --n-sample-per-prompt; did you mean --n-samples-per-prompt?"),
        ("--rollout_batch_size 4", "unknown flag --rollout_batch_size; did you mean --rollout-batch-size?"),
        ("--rollout-batch 4", "unknown flag --rollout-batch; did you mean --rollout-batch-size?"),  # no abbreviations
        ("--rotary-bas 4", "unknown flag --rotary-bas; did you mean --rotary-base?"),
        ("--vllm-max-modle-len 4", "unknown flag --vllm-max-modle-len; did you mean --vllm-max-model-len?"),
        ("--router-polcy x", "unknown flag --router-polcy; did you mean --router-policy?"),
        ("--learning-rate 1", "unknown flag --learning-rate; did you mean --lr?"),
        ("--lerning-rate 1", "unknown flag --lerning-rate; did you mean --lr?"),
        ("--model x", "unknown flag --model; did you mean --hf-checkpoint?"),
        ("--model_name_or_path x", "unknown flag --model_name_or_path; did you mean --hf-checkpoint?"),
        (
            "--batch-size 4",
            "unknown flag --batch-size; did you mean --rollout-batch-size or --global-batch-size?",
        ),
        ("--num-generations 4", "unknown flag --num-generations; did you mean --n-samples-per-prompt?"),
        ("--zzzzzzzz 4", "unknown flag --zzzzzzzz"),
        ("--lr abc", "--lr expects a number, not 'abc'"),
        ("--lr nan", "--lr expects a number, not 'nan'"),
        ("--lr", "--lr expects a number, but nothing follows it"),
        ("--lr 1 2", "unexpected '2': --lr takes one value"),
        ("--seed 1.5", "--seed expects a whole number, not '1.5'"),
        ("--rollout-shuffle 3", "unexpected '3': --rollout-shuffle takes no value"),
        ("--rollout-shuffle=maybe", "unexpected 'maybe': --rollout-shuffle takes no value"),
        ("--qkv-format bshd", "--qkv-format bshd cannot be given: samples are always packed, which is thd"),
        ("--qkv-format sbhd", "--qkv-format expects one of thd, not 'sbhd'"),
        (
            "--rm-type random",
            "--rm-type random cannot be given: random rewards teach nothing; a function of your own comes by "
            "--custom-rm-path",
        ),
        ("--kl-loss-type k4", "--kl-loss-type expects one of k1, k2, k3, low_var_kl, not 'k4'"),
        (
            "--advantage-estimator gpro",
            f"--advantage-estimator expects one of {', '.join(advantages.names())}, not 'gpro'",
        ),
        (
            "--rollout-stop-token-ids 1 x",
            "--rollout-stop-token-ids expects one or more values, each a whole number, not '1 x'",
        ),
        ("--train-env-vars [1]", "--train-env-vars expects a JSON object, e.g. '{\"key\": 1}', not '[1]'"),
        (
            "--model-name x",
            "--model-name is a flag of vime, but this version does not implement it: config.json of --hf-checkpoint "
            "says which model it is",
        ),
        (
            "--sglang-mem-fraction-static 0.7",
            "--sglang-mem-fraction-static does not exist: the engine is vLLM; use --vllm-gpu-memory-utilization",
        ),
        (
            "--sglang-kv-cache-dtype fp8",
            "--sglang-kv-cache-dtype does not exist: the engine is vLLM; use --vllm-kv-cache-dtype",
        ),
        (
            "--sglang-zzz 1",
            "--sglang-zzz does not exist: the engine is vLLM; its flags are --vllm-X, X being one of vLLM's API server",
        ),
        ("--vllm-config x", "--vllm-config is a flag of vime, but this version does not implement it yet"),
    ],
)
def test_one_line_says_what_is_wrong(flags, words, message):
    assert only_violation(flags(*words.split())) == message


def test_words_before_the_first_flag_are_refused(flags):
    assert only_violation(["foo", *flags()]) == "unexpected 'foo': no flag before it takes it"


def test_all_mistakes_are_said_at_once(flags):
    with pytest.raises(UserError) as caught:
        parse_config(flags("--lr", "x", "--seeed", "1", "--eps-clip-c", "1"))
    assert str(caught.value).splitlines() == [
        "unknown flag --seeed; did you mean --seed?",
        "--lr expects a number, not 'x'",
        "--eps-clip-c must be above 1, not 1.0 (it bounds the ratio of negative advantages)",
    ]


def test_a_value_that_cannot_be_read_causes_no_second_complaint(flags):
    words = [word for word in flags() if word != "--num-rollout" and word != "4"]
    assert violations(
        [*words[:-3], "--n-samples-per-prompt", "4", "--rollout-max-response-len", "x", "--num-rollout", "y"]
    ) == [
        "--rollout-max-response-len expects a whole number, not 'x'",
        "--num-rollout expects a whole number, not 'y'",
    ]
