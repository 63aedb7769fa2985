"""The command that resumes a run."""

import sys
from dataclasses import replace

import pytest

from vime.checkpoints import CheckpointStore
from vime.cluster.record import _replaced, _resume_point, resume_command
from vime.config import parse_config
from vime.config.config import Config
from vime.errors import UserError


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


@pytest.fixture
def config_with(tmp_path):
    import dataclasses

    from tests.tiny import make_model

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
            critic=dataclasses.replace(base.critic, critic_save=critic_save),
        )

    return make
