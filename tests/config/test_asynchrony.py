"""train_async.py is train.py with --asynchronous in front: what follows from it, and what it excludes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.config import resolve

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "tests" / "models" / "public_configs"
APART = "--asynchronous --no-colocate --rollout-num-gpus 1"


def config(flags, words):  # type: ignore[no-untyped-def]
    resolution = resolve(flags(*words.split()))
    assert resolution.violations == ()
    return resolution.config


def test_staleness_is_one_training_where_generation_runs_ahead_and_none_elsewhere(flags):
    ahead, in_turn = config(flags, APART), config(flags, "")
    assert (ahead.asynchrony.max_staleness, in_turn.asynchrony.max_staleness) == (1, 0)
    assert ahead.origins["max_staleness"] == "derived: asynchronous"


@pytest.mark.parametrize(
    ("words", "corrected"),
    [
        ("", True),
        ("--max-staleness 0", False),
        ("--use-tis false", False),
        ("--no-use-tis", False),
        ("--use-rollout-logprobs", False),
        ("--rollout-top-p 0.9", False),
        ("--loss-type custom_loss --custom-loss-function-path tests.config.sample_hooks:loss", False),
    ],
)
def test_importance_sampling_is_on_where_samples_may_be_stale_and_it_can_be(flags, words, corrected):
    off_policy = resolve(flags(*APART.split(), *words.split())).config.off_policy
    assert off_policy.use_tis is corrected


def test_a_bound_alone_turns_it_on_too_and_a_given_value_wins(flags):
    assert config(flags, "--max-staleness 1").off_policy.use_tis is True
    assert config(flags, "--max-staleness 0 --use-tis").off_policy.use_tis is True
    assert config(flags, APART).origins["use_tis"] == "derived: max-staleness"
    assert config(flags, APART + " --no-use-tis").origins["use_tis"] == "command line"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--asynchronous",
            "--colocate and train_async.py exclude each other: engines that sleep while the trainer computes cannot "
            "sample at the same time; give them slots of their own by --rollout-num-gpus, or use train.py",
        ),
        (
            APART + " --offload-rollout",
            "--offload-rollout and train_async.py exclude each other: engines that sleep while the trainer computes "
            "cannot sample at the same time; give them slots of their own by --rollout-num-gpus, or use train.py",
        ),
        (
            "--asynchronous --no-colocate --loss-type sft_loss --n-samples-per-prompt 1",
            "--loss-type sft_loss samples nothing that could run ahead of training: use train.py",
        ),
        (
            "--update-weights-interval 2",
            "--update-weights-interval 2 needs train_async.py: train.py samples with the newest weights",
        ),
        (
            APART + " --update-weights-interval 3",
            "--update-weights-interval 3 makes samples 2 trainings stale and --max-staleness 1 allows 1: nothing could "
            "be trained before the next sync",
        ),
        ("--fully-async", "--fully-async needs train_async.py: train.py samples and trains in turn"),
        (
            "--rollout-function-path vime.rollout.fully_async.generate_rollout",
            "--fully-async needs train_async.py: train.py samples and trains in turn",
        ),
        (
            APART + " --fully-async --rollout-function-path tests.config.sample_hooks:rollout",
            "--fully-async and --rollout-function-path exclude each other: both say how rollouts are made",
        ),
        (
            APART + " --fully-async --over-sampling-batch-size 16",
            "--over-sampling-batch-size has no effect with --fully-async: --max-groups-ahead says how many are in "
            "flight",
        ),
        (
            APART + " --fully-async --max-staleness 0",
            "--fully-async with --max-staleness 0: nothing may run ahead; give at least 1, better 2",
        ),
        (APART + " --max-groups-ahead 16", "--max-groups-ahead needs --fully-async"),
        (APART + " --fully-async --max-groups-ahead 0", "--max-groups-ahead must be at least 1, not 0"),
        (
            APART + " --deterministic-rollout",
            "--deterministic-rollout and --max-staleness 1 exclude each other: which weights sample a token depends on "
            "when it is sampled; --max-staleness 0 repeats",
        ),
        (
            APART + " --staleness-policy drop --rollout-function-path tests.config.sample_hooks:rollout",
            "--staleness-policy drop has no effect beside --rollout-function-path, which takes the place of what "
            "drops: use mask or wait",
        ),
        (APART + " --max-staleness -1", "--max-staleness must be at least 0, not -1"),
        (APART + " --update-weights-interval 0", "--update-weights-interval must be at least 1, not 0"),
    ],
)
def test_what_is_refused(flags, words, message):
    assert message in resolve(flags(*words.split())).violations


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--max-staleness 0",
            "--max-staleness 0 with --update-weights-interval 1: no rollout can be sampled while another is trained "
            "on; --max-staleness 1 lets all",
        ),
        (
            "--update-weights-interval 2",
            "--max-staleness 1 with --update-weights-interval 2: only 1 of 2 rollouts can be sampled while another is "
            "trained on; --max-staleness 2 lets all",
        ),
        (
            "--use-rollout-logprobs",
            "--max-staleness 1 without --use-tis, which --use-rollout-logprobs excludes: stale tokens weigh as new "
            "ones",
        ),
        (
            "--partial-rollout",
            "--partial-rollout has no effect in train_async.py with --max-staleness above 0: nothing is interrupted, "
            "groups run on into the next rollout",
        ),
        (
            "--partial-rollout --mask-offpolicy-in-partial-rollout",
            "--partial-rollout and --mask-offpolicy-in-partial-rollout have no effect in train_async.py with "
            "--max-staleness above 0: nothing is interrupted, groups run on into the next rollout",
        ),
        (
            "--buffer-filter-path tests.config.sample_hooks:rollout",
            "--buffer-filter-path has next to no effect in train_async.py with --max-staleness above 0: groups run on "
            "into the next rollout, and only --staleness-policy drop gives some back",
        ),
        (
            "--fully-async",
            "--fully-async with --max-staleness 1 and --staleness-policy wait: every group is due in the very next "
            "rollout, so none can overtake another; --max-staleness 2 lets them",
        ),
        (
            "--fully-async --max-staleness 2 --max-groups-ahead 25",
            "--max-groups-ahead 25: --max-staleness 2 lets no more than 24 start with --staleness-policy wait",
        ),
        (
            "--keep-old-actor",
            "--keep-old-actor takes the newest weights that sampled a token of the rollout, for all of its tokens: "
            "those that are staler have an old policy that did not sample them; --use-rollout-logprobs has each "
            "token's own",
        ),
    ],
)
def test_what_is_doubted(flags, words, message):
    assert message in resolve(flags(*APART.split(), *words.split())).warnings
    assert not resolve(flags(*APART.split())).warnings


@pytest.mark.parametrize(
    "words",
    [
        "--fully-async --max-staleness 2 --max-groups-ahead 24",
        "--fully-async --max-staleness 1 --staleness-policy drop --max-groups-ahead 99",
        "--staleness-policy drop --buffer-filter-path tests.config.sample_hooks:rollout",
    ],
)
def test_what_is_not(flags, words):
    assert resolve(flags(*APART.split(), *words.split())).warnings == ()


MASK = (
    "--staleness-policy mask has no effect in train.py without --over-sampling-batch-size above --rollout-batch-size "
    "or a dynamic sampling filter: no rollout leaves anything to the next one"
)


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        (
            "--max-staleness 5",
            (
                "--max-staleness 5 bounds nothing in train.py with --staleness-policy wait: only --use-tis follows "
                "from it; give --staleness-policy drop or mask, or use train_async.py",
            ),
        ),
        ("--staleness-policy mask --max-staleness 1", (MASK,)),
        ("--staleness-policy mask --max-staleness 1 --over-sampling-batch-size 9", ()),
        ("--staleness-policy mask --dynamic-sampling-filter-path tests.config.sample_hooks:rollout", ()),
    ],
)
def test_a_bound_that_binds_nothing_is_doubted_in_train_py(flags, words, warnings):
    assert resolve(flags(*words.split())).warnings == warnings


@pytest.mark.parametrize("separator", [".", ":"])
def test_the_path_of_the_fully_asynchronous_rollout_stands_for_its_flag(flags, separator):
    path = f"vime.rollout.fully_async{separator}generate_rollout"
    found = config(flags, f"{APART} --rollout-function-path {path} --max-staleness 3")
    assert found.asynchrony.fully_async is True
    assert (found.hooks.rollout_function_path, found.hooks.eval_function_path) == (None, None)
    assert found.origins["rollout_function_path"] == f"derived: {path} is --fully-async"
    assert found.asynchrony.max_groups_ahead == 32, "(3 + 1) x 8"
    assert config(flags, f"{APART} --fully-async").asynchrony.fully_async is True
    assert config(flags, APART).asynchrony.fully_async is False


@pytest.mark.parametrize(("name", "model"), [("cpu", "smollm2-135M"), ("gpu", "qwen3-4B")])
def test_the_example_has_right_flags(tmp_path, name, model):
    """Only files are missing here."""
    (shape,) = [path for path in SHAPES.iterdir() if path.stem.lower() == model.lower()]
    (tmp_path / "config.json").write_text(json.dumps(json.loads(shape.read_text())["config"]))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    words = ["--asynchronous", "--config", str(ROOT / f"examples/fully_async/{name}.yaml")]
    resolution = resolve([*words, "--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "save")])
    assert [line for line in resolution.violations if ": no such" not in line] == []
    assert resolution.warnings == ()
    assert resolution.config.asynchrony.fully_async and resolution.config.off_policy.use_tis
