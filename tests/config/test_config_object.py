"""What a Config is to the rest of the program and to custom functions."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from vime.config import parse_config, parse_or_exit
from vime.config.config import OWN_FLAGS


def test_it_is_frozen(flags):
    config = parse_config(flags())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optimizer.lr = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optimizer = None
    with pytest.raises(TypeError):
        config.vllm["x"] = 1


def test_it_travels_to_other_processes(flags):
    config = parse_config(flags("--vllm-max-num-seqs", "4"))
    assert pickle.loads(pickle.dumps(config)) == config


def test_args_has_every_flag_by_its_name(flags):
    args = parse_config(flags("--vllm-max-num-seqs", "4", "--router-policy", "random", "--swiglu")).args
    assert args.rollout_batch_size == 8
    assert (args.vllm_max_num_seqs, args.router_policy, args.swiglu) == (4, "random", True)
    assert set(OWN_FLAGS) <= set(dir(args))


def test_args_is_read_only(flags):
    args = parse_config(flags()).args
    with pytest.raises(AttributeError, match="args is read-only: lr cannot be set"):
        args.lr = 1
    with pytest.raises(AttributeError, match="args is read-only: lr cannot be deleted"):
        del args.lr


def test_args_names_the_nearest_attribute(flags):
    args = parse_config(flags()).args
    with pytest.raises(AttributeError, match=r"args has no rollout_batchsize; did you mean rollout_batch_size\?"):
        _ = args.rollout_batchsize
    assert getattr(args, "something_else", 5) == 5


def test_args_takes_values_of_the_run_without_changing_itself(flags):
    args = parse_config(flags()).args
    assert args.extended(vllm_router_port=1234).vllm_router_port == 1234
    assert args.vllm_router_port is None


def test_args_travels_to_other_processes(flags):
    args = parse_config(flags()).args
    assert pickle.loads(pickle.dumps(args)).rollout_batch_size == 8


def test_the_dump_has_values_origins_and_no_secrets(flags):
    environment = '{"WANDB_API_KEY": "s3cret", "A": "b"}'
    config = parse_config(
        flags("--use-wandb", "--wandb-key", "s3cret", "--vllm-hf-token", "s3cret", "--train-env-vars", environment)
    )
    text = json.dumps(config.to_dict())
    assert "s3cret" not in text
    dump = json.loads(text)
    assert dump["ops"]["wandb_key"] == {"value": "***", "origin": "command line"}
    assert dump["cluster"]["train_env_vars"]["value"] == {"WANDB_API_KEY": "***", "A": "b"}
    assert dump["optimizer"]["lr"] == {"value": 1e-6, "origin": "default"}
    assert config.ops.wandb_key == "s3cret"


def test_programs_print_one_line_for_each_mistake_and_exit_with_1(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(flags("--lr", "x", "--seed", "y", "--rollout-top-p", "0.9"))
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["error: --lr expects a number, not 'x'", "error: --seed expects a whole number, not 'y'"]


def test_programs_print_doubts_where_there_are_no_mistakes(flags, capsys):
    parse_or_exit(flags("--rollout-top-p", "0.9"))
    assert capsys.readouterr().err.startswith("warning: --rollout-top-p 0.9: ")


def test_who_gives_no_flags_is_told_what_is_required_and_where_all_are_listed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py"])
    with pytest.raises(SystemExit):
        parse_or_exit([])
    *errors, last = capsys.readouterr().err.splitlines()
    assert errors and all(line.startswith("error: ") for line in errors)
    assert last == "python train.py --help lists every flag"


def test_programs_print_help_for_every_flag_and_exit_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: python ")
    said = {line.split()[0] for line in lines if line.startswith("  --")}
    assert {flag.option for flag in OWN_FLAGS.values()} <= said


def test_every_flag_has_a_help_text_that_is_a_sentence():
    for flag in OWN_FLAGS.values():
        assert flag.help[0].isupper() or flag.help.startswith("."), flag.name
        assert flag.help.endswith("."), flag.name
