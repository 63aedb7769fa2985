"""``--config FILE.yaml`` sets the same names; the command line wins."""

from __future__ import annotations

import pytest

from vime.config import parse_config, resolve


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_names_are_in_kebab_case_or_with_underscores(flags, write):
    config = parse_config(flags("--config", write("lr: 2e-6\neps-clip: 0.1\nrollout_shuffle: true\n")))
    assert (config.optimizer.lr, config.algorithm.eps_clip, config.data.rollout_shuffle) == (2e-6, 0.1, True)


def test_the_command_line_wins_over_the_file_wherever_it_stands(flags, write):
    path = write("lr: 2e-6\n")
    assert parse_config(flags("--lr", "3e-6", "--config", path)).optimizer.lr == 3e-6
    assert parse_config(["--config", path, *flags("--lr", "3e-6")]).optimizer.lr == 3e-6


def test_the_origin_names_file_and_line(flags, write):
    path = write("# a comment\nlr: 2e-6\n")
    assert parse_config(flags("--config", path)).origins["lr"] == f"{path}:2"


def test_yaml_reads_1e_6_as_text_and_it_is_a_number_all_the_same(flags, write):
    assert parse_config(flags("--config", write("lr: 1e-6"))).optimizer.lr == 1e-6


def test_a_second_file_wins_over_the_first(flags, write, tmp_path):
    second = tmp_path / "second.yaml"
    second.write_text("lr: 5.0e-6")
    words = flags("--config", write("lr: 1.0e-6\nseed: 7"), "--config", str(second))
    assert (parse_config(words).optimizer.lr, parse_config(words).parallel.seed) == (5e-6, 7)


@pytest.mark.parametrize("form", ["[a, {p}, b, {p}]", "{{a: {p}, b: {p}}}", "[[a, {p}], [b, {p}]]", "a {p} b {p}"])
def test_evaluation_sets(flags, write, prompt_file, form):
    path = write(f"eval-interval: 1\neval-prompt-data: {form.format(p=prompt_file)}")
    assert parse_config(flags("--config", path)).evaluation.eval_prompt_data == (
        ("a", str(prompt_file)),
        ("b", str(prompt_file)),
    )


def test_evaluation_sets_of_the_command_line_replace_those_of_the_file(flags, write, prompt_file):
    path = write(f"eval-interval: 1\neval-prompt-data: [a, {prompt_file}]")
    config = parse_config(flags("--config", path, "--eval-prompt-data", "b", str(prompt_file)))
    assert config.evaluation.eval_prompt_data == (("b", str(prompt_file)),)


def test_flags_of_the_engine_may_be_objects(flags, write):
    path = write("vllm-speculative-config: {method: ngram, num_speculative_tokens: 3}\nvllm-enforce-eager: false")
    assert parse_config(flags("--config", path)).vllm == {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "enforce_eager": False,
    }


def test_null_is_none_where_a_flag_may_be_unset(flags, write):
    assert parse_config(flags("--config", write("eps-clip-c: null"))).algorithm.eps_clip_c is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "{path}:1: unknown key 'lrr'; did you mean lr?"),
        ("\nn_sample_per_prompt: 1", "{path}:2: unknown key 'n_sample_per_prompt'; did you mean n-samples-per-prompt?"),
        (
            "dump-details: x",
            "{path}:1: --dump-details is a flag of vime, but this version does not implement it yet",
        ),
        ("vllm-model: x", "{path}:1: --vllm-model cannot be given: use --hf-checkpoint"),
        ("lr: abc", "{path}:1: lr expects a number, not 'abc'"),
        ("lr: [1]", "{path}:1: lr expects a number, not '1'"),
        ("lr: null", "{path}:1: lr expects a number, not None"),
        ("seed: 1.5", "{path}:1: seed expects a whole number, not 1.5"),
        ("seed: true", "{path}:1: seed expects a whole number, not True"),
        ("rollout-shuffle: 3", "{path}:1: rollout-shuffle expects true or false, not 3"),
        ("lr: 1\nlr: 2", "{path}:2: lr stands there twice"),
        ("- lr", "{path}: expected names and values"),
    ],
)
def test_one_line_says_what_is_wrong(flags, write, text, message):
    path = write(text)
    assert resolve(flags("--config", path)).violations == (message.format(path=path),)


UNREADABLE = [
    ("lr: 1\nwandb-group: caf\xe9\n".encode("latin-1"), "{path}:2: not UTF-8 at byte 17"),
    ("lr: 1\n".encode("utf-16-le"), "{path}: not YAML: unacceptable character #x0000: special characters are not"),
    (b"lr: " + b"[" * 2000 + b"]" * 2000, "{path}: not readable as YAML: too many levels within each other"),
    (
        b"lr: 1\nseed: " + b"1" * 5000,
        "{path}:2: seed: not readable as YAML: Exceeds the limit (4300 digits) for integer string conversion",
    ),
    (b"lr: 1\nsave: 2026-02-32", "{path}:2: save: not readable as YAML: day is out of range for month"),
]


@pytest.mark.parametrize("flag", ["--config", "--eval-config", "--custom-config-path", "--megatron-config-path"])
@pytest.mark.parametrize(("content", "message"), UNREADABLE)
def test_a_file_that_is_no_text_or_too_large_for_python_is_told_in_one_line(flags, tmp_path, flag, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    words = flags(flag, str(path), "--eval-interval", "1")
    if flag == "--megatron-config-path":
        words += ["--advantage-estimator", "ppo"]
    told = [each for each in resolve(words).violations if str(path) in each]
    assert len(told) == 1 and message.format(path=path) in told[0] and "\n" not in told[0]


def test_utf_16_and_a_mark_of_utf_8_are_read(flags, tmp_path):
    for content in ("lr: 0.5\n".encode("utf-16"), "lr: 0.5\n".encode("utf-8-sig")):
        (tmp_path / "run.yaml").write_bytes(content)
        assert parse_config(flags("--config", str(tmp_path / "run.yaml"))).optimizer.lr == 0.5


def test_json_of_too_many_levels_is_refused_as_other_values_are(flags):
    (told,) = resolve(flags("--train-env-vars", "[" * 100_000)).violations
    assert told.startswith("--train-env-vars expects a JSON object") and len(told) < 300


def test_a_file_that_is_not_there(flags, tmp_path):
    path = tmp_path / "none.yaml"
    assert resolve(flags("--config", str(path))).violations == (f"{path}: cannot be read (No such file or directory)",)


def test_an_empty_file_sets_nothing(flags, write):
    assert parse_config(flags("--config", write(""))).optimizer.lr == 1e-6


def test_custom_config_adds_to_the_args_of_custom_functions(flags, write):
    args = parse_config(flags("--custom-config-path", write("max-turns: 5"))).args
    assert (args.max_turns, args.lr) == (5, 1e-6)
