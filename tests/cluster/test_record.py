"""What a run writes to, and the command that resumes it."""

import os
import sys
from dataclasses import replace

import pytest

from vime.checkpoints import CheckpointStore
from vime.cluster.record import (
    _replaced,
    _resume_point,
    beginning,
    open_record,
    own_folders,
    resume_command,
    what_is_kept,
    with_new_run_dir,
)
from vime.config import parse_config
from vime.config.config import Config, FrozenMap
from vime.errors import UserError
from vime.unfinished import identity


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--a", "1", "--load", "old", "--b"], ["train.py", "--a", "1", "--b", "--load", "new"]),
        (["train.py", "--load=old", "--a", "1"], ["train.py", "--a", "1", "--load", "new"]),
        (["train.py"], ["train.py", "--load", "new"]),
    ],
)
def test_a_flag_is_replaced_whatever_its_form(words, expected):
    assert _replaced(words, {"--load": "new"}) == expected


def test_the_root_of_a_critic_is_no_run_to_go_on_from(tmp_path, config_with):
    store = CheckpointStore(tmp_path / "critic")
    store.begin(3)
    store.commit(3, {"id": "0"})
    config = config_with("run")
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(store.root)))
    with pytest.raises(UserError, match=r"^--load .*critic: that is the root of a critic; give it as --critic-load$"):
        _resume_point(config)


def test_there_is_nothing_to_resume_without_save(monkeypatch, config_with):
    monkeypatch.setattr(sys, "argv", ["train.py", "--num-rollout", "3", "--wandb-key", "secret"])
    assert resume_command(config_with(None)) is None
    command = resume_command(config_with("out put"))
    assert command is not None and command.endswith("python train.py --load 'out put' --num-rollout 6")
    command = resume_command(config_with("run", critic_save="critic"))
    assert command is not None and command.endswith("python train.py --load run --num-rollout 6 --critic-load critic")


def test_runs_of_the_same_second_have_folders_of_their_own(config_with, tmp_path):
    config = config_with(None)
    started = config.ops.run_dir
    made = [with_new_run_dir(config).ops for _ in range(3)]
    assert [ops.run_dir for ops in made] == [started, f"{started}-2", f"{started}-3"]
    assert [ops.tensorboard_dir for ops in made] == [f"{ops.run_dir}/tensorboard" for ops in made]
    assert all((tmp_path / ops.run_dir).is_dir() for ops in made)


def test_a_folder_that_the_flags_name_is_taken_as_it_is(config_with, tmp_path):
    (tmp_path / "run").mkdir()
    saving, named = config_with("run"), config_with(None)
    named = replace(
        named,
        ops=replace(named.ops, run_dir="run"),
        origins=FrozenMap({**named.origins, "run_dir": "the command line"}),
    )
    assert with_new_run_dir(saving) is saving
    assert with_new_run_dir(named) is named


def test_two_runs_do_not_share_a_folder(config_with, tmp_path):
    first, second = config_with(f"{tmp_path}/a", f"{tmp_path}/c"), config_with(f"{tmp_path}/b", f"{tmp_path}/c")
    shared = config_with(f"{tmp_path}/a")
    same_record = replace(config_with(f"{tmp_path}/d"), ops=first.ops)
    with own_folders(first):
        for other, told in ((second, "--critic-save .*/c"), (shared, "--save .*/a"), (same_record, "--run-dir ")):
            with pytest.raises(UserError, match=rf"^{told}.*: another run writes there \(process "), own_folders(other):
                pass
    with own_folders(second):
        pass


def test_two_runs_do_not_write_versions_of_weights_to_one_folder(config_with, tmp_path):
    first, second = config_with(f"{tmp_path}/a"), config_with(f"{tmp_path}/b")
    disk = replace(first.engine, update_weight_transport="disk", update_weight_disk_dir=f"{tmp_path}/versions")
    told = r"^--update-weight-disk-dir .*/versions: another run writes there"
    with (
        own_folders(replace(first, engine=disk)),
        pytest.raises(UserError, match=told),
        own_folders(replace(second, engine=disk)),
    ):
        pass


def test_a_second_run_touches_nothing_of_the_first(config_with, tmp_path):
    config = config_with(f"{tmp_path}/run")
    with open_record(config, total=3) as record:
        record.recorder.log({"a": 1.0}, rollout_id=0, step=0)
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
        with pytest.raises(UserError, match="another run writes there"), open_record(config, total=3):
            pass
        assert {path: path.read_bytes() for path in before} == before


def test_what_a_killed_process_left_is_seen_at_the_start(config_with, tmp_path):
    work = CheckpointStore(tmp_path / "run").begin(3)
    work.rename(work.with_name(work.name.replace(identity(os.getpid()), identity(os.getppid()))))
    with pytest.raises(UserError, match="another process is saving there"), own_folders(config_with(f"{tmp_path}/run")):
        pass


def test_a_state_that_is_none_of_a_run_is_damaged(config_with, tmp_path):
    store = CheckpointStore(tmp_path / "run")
    for rollout_id in (2, 3):
        store.begin(rollout_id)
        store.commit(rollout_id, {})
    config = config_with(None)
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(store.root)))
    with pytest.raises(UserError, match=r"iter_0000003/vime_state.json: .* --ckpt-step 2 takes the one before$"):
        _resume_point(config)


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on(tmp_path, monkeypatch, config_with):
    root = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["train.py", "--num-rollout", "9", "--ckpt-step", "1", "--save", root])
    config = config_with(root)
    assert what_is_kept(config_with(None)) == ["nothing was saved: no --save"]
    assert what_is_kept(config) == ["nothing was saved: no --save-interval"]
    often = replace(config, checkpoint=replace(config.checkpoint, save_interval=5))
    assert what_is_kept(often) == ["nothing was saved yet: --save-interval 5"]
    store = CheckpointStore(root)
    store.begin(4)
    store.commit(4, {"metrics_position": 0, "source": {}})
    saved, command = what_is_kept(often)
    assert saved == f"saved: {root}/iter_0000004, after rollout 5"
    assert command.startswith("Continue: ")
    assert command.endswith(f"python train.py --num-rollout 9 --save {root} --load {root}"), "it is as long as it was"


def test_a_run_says_what_it_starts_from(tmp_path, config_with):
    config = config_with(str(tmp_path / "run"))
    model, load = config.checkpoint.hf_checkpoint, str(tmp_path / "run")
    config = replace(config, checkpoint=replace(config.checkpoint, load=load))
    assert beginning(config, _resume_point(config)) == f"no checkpoint in {load} yet: the run starts from {model}"
    store = CheckpointStore(load)
    store.begin(3)
    store.commit(3, {"metrics_position": 0, "source": {}})
    assert beginning(config, _resume_point(config)) == (
        f"resuming from {load}/iter_0000003: the next rollout is number 5"
    )
    other = replace(config, checkpoint=replace(config.checkpoint, load=model))
    assert beginning(other, _resume_point(other)) == f"the run starts from the weights in {model}"


@pytest.fixture
def config_with(tmp_path, monkeypatch):
    import dataclasses

    from tests.tiny import make_model

    monkeypatch.chdir(tmp_path)  # where a run without --save has its folder
    model = make_model(tmp_path / "model")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"input": "1 + 1", "label": "2"}\n')
    flags = f"--hf-checkpoint {model} --prompt-data {prompts} --label-key label --rm-type last_number --num-rollout 3"
    flags += " --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 8"
    flags += " --colocate --actor-num-gpus-per-node 1"
    base = parse_config(flags.split())

    def make(save: str | None, critic_save: str | None = None) -> Config:
        return dataclasses.replace(
            base,
            checkpoint=dataclasses.replace(base.checkpoint, save=save),
            ops=dataclasses.replace(base.ops, run_dir=save or base.ops.run_dir),
            critic=dataclasses.replace(base.critic, critic_save=critic_save),
        )

    return make
