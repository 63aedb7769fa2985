"""Routes of rollouts: training computes each token with the experts that the engine sent it to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import make_model
from tests.training.harness import batch_of, config_of, make_samples, make_step, started
from tests.training.layouts import whole_gradients
from tests.training.test_replay import FULL, SELECTIVE, seen_packs
from vime.models import weight_map
from vime.training.layers.context import ContextPart
from vime.training.layers.moe import Router
from vime.training.packing import Packer, RankRoutes
from vime.training.replay import RolloutRoutes, Routes
from vime.training.worker import TrainWorker
from vime.types import TokenScores, TrainBatch, TrainSample

EXPERTS, CHOSEN, LAYERS = 8, 2, (2, 3)  # Megatron counts layers from 1; the first one is dense
TWO_STEPS = ["--num-steps-per-rollout", "2"]
FLAGS = ["--fp32", "--lr", "1e-2", *TWO_STEPS]
FOLLOW = "--use-rollout-routing-replay"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("routes") / "model", "qwen3_moe", num_hidden_layers=3)


def told(samples: Sequence[TrainSample]) -> tuple[TrainSample, ...]:
    """With routes that no router would choose, of all tokens but the last; those of a prompt are the same."""

    def drawn(sample: TrainSample) -> np.ndarray:
        prompt = sample.total_length - sample.response_length
        parts = ((prompt, sample.group_index), (sample.response_length - 1, 100 + sample.index))
        scores = [np.random.default_rng(seed).random((count, len(LAYERS), EXPERTS)) for count, seed in parts]
        return np.concatenate(scores).argsort(-1)[..., :CHOSEN].astype(np.uint8)

    return tuple(dataclasses.replace(sample, routed_experts=drawn(sample)) for sample in samples)


def two_steps(samples: Sequence[TrainSample]) -> TrainBatch:
    return batch_of(samples, make_step(samples[:4], (0, 1), (2, 3)), make_step(samples[4:], (4, 5, 6), (7,)))


@contextmanager
def watched() -> Iterator[list[tuple[Routes | None, int, Tensor]]]:
    """Of each pass through a router: what it was told, its layer, and the experts of each token, bool [T, experts]."""
    seen: list[tuple[Routes | None, int, Tensor]] = []
    route = Router.routing

    def watching(self: Router, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, chosen = route(self, *args, **kwargs)
        routes = None if self.router_replay is None else self.router_replay.routes
        seen.append((routes, self.layer_number, chosen.clone()))
        return probs, chosen

    with mock.patch.object(Router, "routing", watching):
        yield seen


def as_map(experts: Tensor) -> Tensor:
    return torch.zeros(len(experts), EXPERTS, dtype=torch.bool).scatter_(1, experts.long(), True)


@pytest.mark.parametrize("recompute", [[], FULL, SELECTIVE], ids=["kept", "full recompute", "selective recompute"])
def test_every_token_goes_where_the_engine_sent_it(model: Path, recompute: list[str]) -> None:
    """In the pass that takes the log-probs, in the one that is differentiated, and where that is repeated."""
    with seen_packs() as packs, watched() as seen, started(config_of(model, *FLAGS, FOLLOW, *recompute)) as worker:
        worker.train(two_steps(told(make_samples())))
    assert len(packs) == 4
    assert len(seen) == (3 if recompute else 2) * 4 * len(LAYERS)
    for routes, layer, chosen in seen:
        assert routes is not None and routes.told is not None and routes.told.complete
        assert torch.equal(chosen, as_map(routes.told.experts[layer]))


def test_nothing_is_computed_to_choose_routes_that_are_known(model: Path) -> None:
    """One step needs no log-probs of its own."""
    with watched() as seen, started(config_of(model, "--fp32", FOLLOW)) as worker:
        worker.train(batch_of(told(make_samples())))
    assert len(seen) == len(LAYERS)


def test_loss_and_gradient_are_those_of_a_plain_model_along_the_same_routes(model: Path) -> None:
    samples = told(make_samples())
    flags = ["--fp32", "--lr", "0", "--clip-grad", "0", FOLLOW]
    with started(config_of(model, *flags)) as worker:
        (metrics,) = worker.train(batch_of(samples)).steps
        gradients = whole_gradients(worker, weight_map(worker.shape))
    expected, norm = plain_gradients(model, samples)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in expected.items():
        assert float((gradients[name] - value).norm()) < 1e-4 * float(value.norm()), name
    assert float(expected["model.layers.1.mlp.gate.weight"].norm()) > 1e-3  # the weights of the chosen experts learn


def plain_gradients(model: Path, samples: Sequence[TrainSample]) -> tuple[dict[str, Tensor], float]:
    """Of the mean over samples of the mean over tokens of -A log p, by transformers; and their norm.

    That is the gradient of PPO's loss while the policy is the old one.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    routers = [module for module in plain.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    given: dict[int, Tensor] = {}

    def route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.t()
        chosen = given[id(self)]
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    with mock.patch.object(Qwen3MoeTopKRouter, "forward", route):
        for sample in samples:
            assert sample.routed_experts is not None
            given |= {
                id(each): torch.tensor(sample.routed_experts[:, i], dtype=torch.int64) for i, each in enumerate(routers)
            }
            begin = sample.total_length - sample.response_length
            logits = plain(torch.tensor([sample.tokens[:-1]])).logits[0, begin - 1 :]
            targets = torch.tensor(sample.tokens[begin:])
            log_probs = logits.log_softmax(-1).gather(1, targets[:, None])
            (-sample.reward * log_probs.mean() / len(samples)).backward()
    gradients = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    return {name: each for name, each in gradients.items() if ".experts." not in name}, norm


def test_a_router_that_would_choose_otherwise_moves_log_probs_less(model: Path, tmp_path: Path) -> None:
    """Weights that are a little off, as rounding makes them, flip near ties; along given routes nothing jumps."""
    samples = make_samples(16)
    batch = batch_of(samples)
    with watched() as seen, started(config_of(model, "--fp32")) as worker:
        truth = log_probs_of(worker, batch)
        packs = [worker._packer.pack(batch.samples)]
    routes = as_numbers([chosen for _, _, chosen in seen])
    off = disturbed(model, tmp_path / "off")
    with watched() as seen, started(config_of(off, "--fp32")) as worker:
        free = log_probs_of(worker, batch)
    flipped = (as_numbers([chosen for _, _, chosen in seen]) != routes).any(-1).float().mean()
    with started(config_of(off, "--fp32", FOLLOW)) as worker:
        (pack,) = packs
        experts = {layer: routes[i].short() for i, layer in enumerate(LAYERS)}
        pack.segments.routes = Routes(told=RolloutRoutes(experts))
        followed = worker._log_probs([pack])[0]
    assert followed is not None
    assert flipped > 0.005
    assert (followed - truth).abs().max() < 0.5 * (free - truth).abs().max()


def log_probs_of(worker: TrainWorker, batch: TrainBatch) -> Tensor:
    (found,) = worker._log_probs([worker._packer.pack(batch.samples)])
    assert found is not None
    return found


def as_numbers(maps: Sequence[Tensor]) -> Tensor:
    """int64 [layers, T, top_k], in ascending order."""
    return torch.stack([each.nonzero()[:, 1].view(-1, CHOSEN) for each in maps])


def disturbed(model: Path, folder: Path) -> Path:
    """The model, with gates that are off by 2 %."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith("mlp.gate.weight")]:
        noise = torch.randn(weights[name].shape, generator=generator)
        weights[name] = weights[name] + 0.02 * weights[name].std() * noise
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_tokens_without_a_route_go_where_the_router_sends_them(model: Path) -> None:
    """In the pass that meets them first: whatever follows the same routes later, as training does behind a log-prob
    pass that chose, repeats that choice."""
    whole = told(make_samples())
    routes = [sample.routed_experts for sample in whole]
    assert routes[1] is not None and routes[2] is not None
    partly = [
        dataclasses.replace(whole[0], routed_experts=None),
        dataclasses.replace(whole[1], routed_experts=routes[1][:-2]),
        dataclasses.replace(whole[2], routed_experts=routes[2].astype(np.int16)),
        *whole[3:],
    ]
    partly[2].routed_experts[-1] = -1  # type: ignore[index]
    for flags in ([FOLLOW], [FOLLOW, "--use-routing-replay"]):
        with watched() as seen, started(config_of(model, *FLAGS, *flags)) as worker:
            worker.train(two_steps(partly))
        chosen_before: dict[tuple[int, int], Tensor] = {}
        for known, layer, chosen in seen:
            assert known is not None and known.told is not None
            has = ~known.told.untold.get(layer, torch.zeros(len(chosen), dtype=torch.bool))
            assert torch.equal(chosen[has], as_map(known.told.experts[layer][has]))
            assert (chosen.sum(1) == CHOSEN).all()
            first = chosen_before.setdefault((id(known), layer), chosen)
            assert torch.equal(chosen, first)
        incomplete = {id(known) for known, _, _ in seen if known and known.told and not known.told.complete}
        assert len(incomplete) == 2  # micro-batches


def test_the_reference_routes_for_itself(model: Path) -> None:
    batch = batch_of(told(make_samples()))
    reference = ["--fp32", "--use-kl-loss", "--num-steps-per-rollout", "2", "--ref-load", str(model)]
    scores = {}
    for flags in ([], [FOLLOW]):
        with started(config_of(model, *reference, *flags)) as worker:
            scores[bool(flags)] = worker.score(two_steps(batch.samples))
    assert all(scores[True][i].ref_log_probs == scores[False][i].ref_log_probs for i in scores[True])
    assert all(scores[True][i].log_probs != scores[False][i].log_probs for i in scores[True])
    assert all(scores[False][i].log_probs == scores[False][i].ref_log_probs for i in scores[True])


def with_gaps(samples: Sequence[TrainSample]) -> tuple[TrainSample, ...]:
    """Without routes of the first sample and of the end of the sixth: ``two_steps`` packs both with another one."""
    routes = samples[5].routed_experts
    assert routes is not None
    lacking = {0: None, 5: routes[:-2]}
    return tuple(
        dataclasses.replace(sample, routed_experts=lacking[i]) if i in lacking else sample
        for i, sample in enumerate(samples)
    )


PPO = ["--advantage-estimator", "ppo", "--kl-coef", "0.2"]


@pytest.mark.parametrize(
    ("flags", "passing"),
    [
        ([*TWO_STEPS, *PPO], 2),
        ([*TWO_STEPS, "--use-rollout-logprobs"], 2),
        ([*TWO_STEPS, *PPO, "--use-routing-replay"], 4),
        (PPO, 0),
    ],
    ids=["scored before", "log-probs of the engine", "both kinds of replay", "one step"],
)
def test_tokens_without_a_route_are_routed_before_weights_move(model: Path, flags: list[str], passing: int) -> None:
    """Also where no pass is needed for log-probs: then one is done of the micro-batches with such tokens alone."""
    batch = two_steps(with_gaps(told(make_samples())))
    if TWO_STEPS[0] not in flags:
        step = make_step(batch.samples, *(micro for each in batch.steps for micro in each.micro_batches))
        batch = dataclasses.replace(batch, steps=(step,))
    plain = ["--fp32", "--lr", "1", "--ref-load", str(model), FOLLOW]
    with started(config_of(model, *plain, *PPO, *TWO_STEPS)) as worker, watched() as before:
        scores = worker.score(batch)
    with started(config_of(model, *plain, *flags)) as worker, seen_packs() as packs, watched() as seen:
        worker.train(with_scores(batch, scores) if PPO[0] in flags else batch)
    by_pack = [[chosen for routes, _, chosen in before if routes is not None][i : i + 2] for i in range(0, 8, 2)]
    numbers = {id(pack.segments.routes): number for number, pack in enumerate(packs)}
    for routes, layer, chosen in seen:
        assert torch.equal(chosen, by_pack[numbers[id(routes)]][LAYERS.index(layer)])
    assert len(seen) == (passing + 4) * len(LAYERS)


def with_scores(batch: TrainBatch, of_actor: dict[int, TokenScores]) -> TrainBatch:
    """As the trainer gets it once actor and critic have been asked."""
    values = {each.index: TokenScores(values=(0.0,) * each.response_length) for each in batch.samples}
    scores = {index: found.merged(values[index]) for index, found in of_actor.items()}
    samples = tuple(dataclasses.replace(each, scores=scores[each.index]) for each in batch.samples)
    return dataclasses.replace(batch, samples=samples)


def test_the_first_pass_chooses_what_is_not_told_and_later_ones_follow() -> None:
    """A token is not routed again where it is computed again, and nothing is chosen where all is told."""
    experts, untold = torch.tensor([[1, 2], [0, 0], [4, 3]], dtype=torch.uint8), torch.tensor([False, True, False])
    scores = torch.rand(3, EXPERTS)
    top = scores.topk(CHOSEN).indices
    choose = mock.Mock(side_effect=lambda scores, top_k, **_: scores.topk(top_k))
    routes = Routes(told=RolloutRoutes({3: experts}, {3: untold}))
    for given in (scores, scores.flip(1), scores.flip(1)):
        weights, chosen = routes.at(3).get_replay_topk(given, CHOSEN, None, None, choose)
        assert chosen.tolist() == [[1, 2], top[1].tolist(), [4, 3]]
        assert torch.equal(weights, given.gather(1, chosen))
    assert choose.call_count == 1
    Routes(told=RolloutRoutes({3: experts})).at(3).get_replay_topk(scores, CHOSEN, None, None, choose)
    assert choose.call_count == 1


def packer(**options: Any) -> Packer:
    columns = RankRoutes(columns={3: 1}, num_experts=EXPERTS, top_k=CHOSEN, **options.pop("rank", {}))
    return Packer(device=torch.device("cpu"), dtype=torch.float32, routes=columns, **options)


@pytest.mark.parametrize("silent", [False, True])
def test_a_shared_prompt_follows_the_sample_that_tells_most(silent: bool) -> None:
    """The first one tells less of it, or has rows that tell nothing."""
    first, second = told(make_samples(2))
    assert first.routed_experts is not None and second.routed_experts is not None
    prompt, branch = first.total_length - first.response_length, first.total_length - 1
    nothing = np.full((branch, len(LAYERS), CHOSEN), -1, np.int16)
    known = second.routed_experts[: prompt - 1] if silent else second.routed_experts
    first = dataclasses.replace(first, routed_experts=nothing if silent else first.routed_experts[: prompt - 1])
    pack = packer(tree_tokens=100).pack([first, dataclasses.replace(second, routed_experts=known)])
    assert pack.rollout_routes is not None and not pack.rollout_routes.complete
    experts, untold = pack.rollout_routes.experts[3], pack.rollout_routes.untold[3]
    there = [*range(min(prompt, len(known))), *range(branch, branch + len(known) - prompt)]
    assert torch.equal(experts[there], torch.from_numpy(known[:, 1]))
    assert (~untold).nonzero().flatten().tolist() == there


def test_a_rank_has_the_routes_of_its_tokens_and_layers() -> None:
    """Filled up to a multiple of 8, cut for context parallelism, and what is left for sequence parallelism.

    A rank keeps a byte for each expert of its tokens and layers, and nothing of the others.
    """
    samples = told(make_samples(3))
    whole = packer(multiple=8).pack(samples)
    assert whole.rollout_routes is not None and list(whole.rollout_routes.experts) == [3]
    experts = whole.rollout_routes.experts[3]
    rows = [sample.routed_experts[:, 1] for sample in samples if sample.routed_experts is not None]
    count = sum(map(len, rows))
    assert torch.equal(experts[:count], torch.from_numpy(np.concatenate(rows)))
    assert 0 < len(experts) - count < 8
    for rank in range(2):
        context = ContextPart(rank, 2)
        mine = experts[context.tokens(len(experts))]
        for part in range(2):
            cut = packer(multiple=8, part=context, rank={"part": part, "parts": 2}).pack(samples).rollout_routes
            assert cut is not None and torch.equal(cut.experts[3], mine.chunk(2)[part])
            assert cut.experts[3].untyped_storage().nbytes() == len(experts) // 4 * CHOSEN


@pytest.mark.parametrize("multiple", [1, 64])
def test_tokens_that_fill_a_pack_leave_no_gap(multiple: int) -> None:
    """Whichever experts they go to: to all of them alike."""
    samples = told(make_samples(3))
    routes = packer(multiple=multiple).pack(samples).rollout_routes
    assert routes is not None and routes.complete
    filling = routes.experts[3][sum(sample.total_length - 1 for sample in samples) :].long()
    assert bool(len(filling)) == (multiple > 1)
    counts = torch.bincount(filling.flatten(), minlength=EXPERTS)
    assert counts.max() - counts.min() <= 1
    assert (filling[:, 0] != filling[:, 1]).all()


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_an_expert_takes_a_byte_also_where_routes_have_gaps(num_experts: int, dtype: torch.dtype) -> None:
    (sample,) = told(make_samples(1))
    assert sample.routed_experts is not None
    gaps = sample.routed_experts.astype(np.int16)
    gaps[1, 1] = -1
    wanted = RankRoutes(columns={3: 1}, num_experts=num_experts, top_k=CHOSEN)
    pack = dataclasses.replace(packer(), routes=wanted).pack([dataclasses.replace(sample, routed_experts=gaps)])
    assert pack.rollout_routes is not None
    assert pack.rollout_routes.experts[3].dtype == dtype
    assert pack.rollout_routes.untold[3].nonzero().flatten().tolist() == [1]


def test_every_token_of_a_sample_without_routes_is_left_to_the_router() -> None:
    pack = packer().pack(make_samples(2))
    assert pack.rollout_routes is not None and not pack.rollout_routes.complete
    assert pack.rollout_routes.untold[3].all()
