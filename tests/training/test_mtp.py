"""The layer for multi-token prediction on one process: what it learns, what it leaves alone, and where it is saved."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import add_mtp_layer, make_model
from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from tests.training.layouts import whole_gradients, whole_tensors
from vime.errors import UserError
from vime.models import weight_map
from vime.training.convert import hf_to_torch_dist, torch_dist_to_hf
from vime.types import TrainSample

TRAINED = ["--mtp-num-layers", "1", "--enable-mtp-training"]
LAYER = "model.layers.2."
COPIES = {
    f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{LAYER}shared_head.head.weight": "lm_head.weight",
}
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")  # beside the ordinary layer's
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp_layer(make_model(tmp_path_factory.mktemp("glm4_moe") / "model", "glm4_moe"))


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp_layer(make_model(tmp_path_factory.mktemp("deepseek") / "model", "deepseek_v3", dtype="bfloat16"))


def distinct_samples() -> tuple[TrainSample, ...]:
    """No two with the same prompt, so that nothing is shared with or without the layer; one has a prompt of a token."""
    samples = make_samples(16, masked=True)[::2]
    short = dataclasses.replace(samples[0], tokens=samples[0].tokens[-samples[0].response_length - 1 :])
    return (short, *samples[1:])


def weights_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def assert_same_bits(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


class Reference:
    """The layer written out around the one that transformers has for the decoder."""

    def __init__(self, model: Path, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        tensors = weights_of(model)
        self.own = {name: tensors.pop(LAYER + name).requires_grad_() for name in OWN}
        config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 3}
        shutil.copytree(model, scratch)
        save_file({n: t for n, t in tensors.items() if n not in COPIES}, scratch / "model.safetensors")
        (scratch / "config.json").write_text(json.dumps(config))
        deeper = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.layer = deeper.model.layers[2]

    def loss(self, samples: Sequence[TrainSample], temperature: float, *, per_token: bool) -> torch.Tensor:
        total = torch.zeros(())
        for sample in samples:
            found = self._log_probs(torch.tensor(sample.tokens), temperature)[-sample.response_length :]
            mask = torch.tensor(sample.loss_mask, dtype=torch.float32)
            part = -(found * mask[-len(found) :]).sum()
            total = total + part / (1 if per_token else max(mask.sum(), 1) * len(samples))
        return total / sum(max(sample.trained_tokens, 1) for sample in samples) if per_token else total

    def _log_probs(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Of the tokens from the third one on, each given those up to the one before the one before."""
        with torch.no_grad():
            hidden = self.policy.model(tokens[None]).last_hidden_state[0, :-1]
            following = self.policy.model.embed_tokens(tokens[1:])
        both = torch.cat((_norm(following, self.own["enorm.weight"]), _norm(hidden, self.own["hnorm.weight"])), -1)
        x = (both @ self.own["eh_proj.weight"].t())[None]
        positions = torch.arange(len(tokens) - 1)[None]
        mask = torch.full((len(tokens) - 1,) * 2, -torch.inf).triu(1)[None, None]
        rotary = self.policy.model.rotary_emb(x, positions)
        x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        x = _norm(x[0], self.own["shared_head.norm.weight"]) @ self.policy.lm_head.weight.detach().t()
        return torch.log_softmax(x[:-1] / temperature, -1).gather(-1, tokens[2:, None]).squeeze(-1)

    def gradients(self) -> Tensors:
        """By HF name; transformers keeps the experts of a layer in two tensors."""
        found = {f"{LAYER}{name}": tensor.grad for name, tensor in self.own.items()}
        for name, parameter in self.layer.named_parameters():
            if name.endswith("mlp.experts.gate_up_proj"):
                for expert, gradient in enumerate(parameter.grad):
                    gate, up = gradient.chunk(2)
                    found |= {
                        f"{LAYER}mlp.experts.{expert}.{x}_proj.weight": g for x, g in (("gate", gate), ("up", up))
                    }
            elif name.endswith("mlp.experts.down_proj"):
                found |= {f"{LAYER}mlp.experts.{e}.down_proj.weight": g for e, g in enumerate(parameter.grad)}
            else:
                found[LAYER + name] = parameter.grad
        return found


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_loss_and_gradient_are_those_of_plain_pytorch(model: Path, tmp_path: Path, per_token: bool) -> None:
    samples, temperature, coef = distinct_samples(), 0.7, 0.3
    flags = ["--fp32", "--clip-grad", "0", "--rollout-temperature", str(temperature), *TRAINED]
    flags += ["--mtp-loss-scaling-factor", str(coef), *(["--calculate-per-token-loss"] if per_token else [])]
    with started(config_of(model, *flags)) as worker:
        (metrics,) = worker.train(batch_of(samples, make_step(samples, (0, 1, 2, 3), (4, 5, 6, 7)))).steps
        gradients = {
            name: tensor
            for name, tensor in whole_gradients(worker, weight_map(worker.shape)).items()
            if name.startswith(LAYER)
        }
    reference = Reference(model, tmp_path / "deeper")
    loss = reference.loss(samples, temperature, per_token=per_token)
    (coef * loss).backward()
    expected = {name: gradient for name, gradient in reference.gradients().items() if gradient is not None}
    assert metrics["train/mtp_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert {name for name in gradients if "e_score_correction_bias" not in name} == expected.keys()
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= 2e-5 * float(gradient.norm()), name
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert metrics["train/mtp_grad_norm"] == pytest.approx(total.item(), rel=1e-5)


def learned(model: Path, *flags: str) -> tuple[list[dict[str, float]], Tensors]:
    """The metrics of two clipped steps and the weights after them."""
    samples = distinct_samples()
    steps = make_step(samples[:4], (0, 1), (2, 3)), make_step(samples[4:], (4, 5, 6, 7))
    settings = [
        "--fp32",
        "--lr",
        "1e-3",
        "--clip-grad",
        "0.01",
        "--num-steps-per-rollout",
        "2",
        "--entropy-coef",
        "0.01",
    ]
    with started(config_of(model, *settings, *flags)) as worker:
        metrics = worker.train(batch_of(samples, *steps)).steps
        return [{k: v for k, v in each.items() if not k.startswith("perf/")} for each in metrics], whole_tensors(
            worker, weight_map(worker.shape)
        )


def test_the_policy_learns_to_the_last_bit_what_it_learns_without(model: Path) -> None:
    """Losses, norms and weights, although the layer's gradient is larger than the norm to which all are clipped."""
    alone, without = learned(model)
    beside, with_layer = learned(model, *TRAINED)
    assert [{k: v for k, v in each.items() if "mtp" not in k} for each in beside] == alone
    assert all(each["train/mtp_grad_norm"] > 0.01 for each in beside)
    assert_same_bits({name: tensor for name, tensor in with_layer.items() if not name.startswith(LAYER)}, without)


def test_the_layer_learns_the_rollouts(model: Path) -> None:
    samples = distinct_samples()
    with started(config_of(model, "--fp32", "--lr", "1e-2", *TRAINED)) as worker:
        losses = [worker.train(batch_of(samples)).steps[0]["train/mtp_loss"] for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_an_export_has_the_trained_layer_and_current_copies(
    family: str, model: Path, latent_model: Path, tmp_path: Path
) -> None:
    origin, precision = (model, "--fp32") if family == "glm4_moe" else (latent_model, "--bf16")
    samples = distinct_samples()
    with started(config_of(origin, precision, "--lr", "1e-2", *TRAINED)) as worker:
        worker.save_hf(tmp_path / "before")
        worker.train(batch_of(samples))
        worker.save_hf(tmp_path / "after")
        sent = whole_tensors(worker, weight_map(worker.shape))
    assert_same_bits(weights_of(tmp_path / "before"), weights_of(origin))
    before, after = weights_of(origin), weights_of(tmp_path / "after")
    assert after.keys() == before.keys()
    for copy, of in COPIES.items():
        assert torch.equal(after[copy], after[of])
        assert not torch.equal(after[copy], before[copy])
    moved = [name for name in after if name.startswith(LAYER) and not torch.equal(after[name], before[name])]
    still = {name for name in after if name.startswith(LAYER)} - set(moved)
    assert all(name.endswith("e_score_correction_bias") or ".mlp.experts." in name for name in still)
    assert f"{LAYER}eh_proj.weight" in moved
    assert sent.keys() == after.keys() - COPIES.keys()
    assert all(torch.equal(sent[name], after[name].float()) for name in sent)


def test_a_folder_without_copies_gets_none(tmp_path: Path) -> None:
    origin = add_mtp_layer(make_model(tmp_path / "model", "glm4_moe"), copies=False)
    with started(config_of(origin, "--fp32", *TRAINED)) as worker:
        worker.save_hf(tmp_path / "out")
    assert_same_bits(weights_of(tmp_path / "out"), weights_of(origin))


def test_without_training_the_layer_is_carried_along(model: Path, tmp_path: Path) -> None:
    with started(config_of(model, "--fp32", "--lr", "1e-2", "--mtp-num-layers", "1")) as worker:
        assert not [name for name in whole_tensors(worker, weight_map(worker.shape)) if name.startswith(LAYER)]
        (metrics,) = worker.train(batch_of(distinct_samples())).steps
        worker.save_hf(tmp_path / "out")
    before, after = weights_of(model), weights_of(tmp_path / "out")
    assert "train/mtp_loss" not in metrics
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith(LAYER))
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize("flags", [[], ["--mtp-num-layers", "1"]], ids=["seen in the checkpoint", "asked for"])
def test_conversion_there_and_back_keeps_the_layer(latent_model: Path, tmp_path: Path, flags: list[str]) -> None:
    there = ["--hf-checkpoint", str(latent_model), "--save", str(tmp_path / "there"), "--mtp-num-layers", "1"]
    checkpoint = hf_to_torch_dist(there)
    origin = shutil.copytree(latent_model, tmp_path / "origin")
    changed = {name: tensor * 2 if name.startswith(LAYER) else tensor for name, tensor in weights_of(origin).items()}
    save_file(changed, origin / "model.safetensors", metadata={"format": "pt"})  # what is carried would show
    torch_dist_to_hf(checkpoint, tmp_path / "back", origin, flags=flags)
    assert_same_bits(weights_of(tmp_path / "back"), weights_of(latent_model))


def test_training_starts_from_a_converted_checkpoint(latent_model: Path, tmp_path: Path) -> None:
    there = ["--hf-checkpoint", str(latent_model), "--save", str(tmp_path / "there"), "--mtp-num-layers", "1"]
    hf_to_torch_dist(there)
    with started(config_of(latent_model, "--bf16", *TRAINED, "--ref-load", str(tmp_path / "there"))) as worker:
        found = whole_tensors(worker, weight_map(worker.shape))
    assert_same_bits(found, {name: t.float() for name, t in weights_of(latent_model).items() if name not in COPIES})


def test_a_checkpoint_without_the_layer_is_told(latent_model: Path, tmp_path: Path) -> None:
    hf_to_torch_dist(["--hf-checkpoint", str(latent_model), "--save", str(tmp_path / "there")])
    config = config_of(latent_model, "--bf16", *TRAINED, "--ref-load", str(tmp_path / "there"))
    with pytest.raises(UserError, match=r"it has no mtp\.layers\.0"), started(config):
        pass
    with pytest.raises(UserError, match=r"it has no mtp\.layers\.0\.enorm"):
        torch_dist_to_hf(
            tmp_path / "there" / "iter_0000000", tmp_path / "back", latent_model, flags=["--mtp-num-layers", "1"]
        )


def test_a_folder_without_the_layer_is_told(model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(model_of("glm4_moe"), tmp_path / "model")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    trained = config_of(folder, "--fp32", *TRAINED)
    with pytest.raises(UserError, match=r"missing tensors: model\.layers\.2\.enorm"), started(trained):
        pass


def test_a_skipped_step_names_the_samples_that_the_draft_layer_fails_on(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = distinct_samples()
    with started(config_of(model, "--fp32", *TRAINED)) as worker:
        ((_, parameter),) = [
            named for chunk in worker.chunks for named in chunk.named_parameters() if "enorm.weight" in named[0]
        ]
        parameter.data.fill_(float("nan"))
        (metrics,) = worker.train(batch_of(samples, make_step(samples, (0, 1), range(2, 8)))).steps
    assert metrics["train/skipped_steps"] == 1
    assert "not finite: the loss of sample" in caplog.text


def test_every_norm_of_a_skipped_step_is_told(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = {"grad_norm": 1.5, "mtp_grad_norm": float("nan")}
    monkeypatch.setattr("vime.training.step.apply_gradients", lambda optimizer: (False, norms))
    with started(config_of(model, "--fp32", *TRAINED)) as worker:
        worker.train(batch_of(distinct_samples()))
    assert "grad_norm 1.5, mtp_grad_norm nan" in caplog.text
