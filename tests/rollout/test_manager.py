"""Generation and evaluation over fake engines: seeds by identity, bounded concurrency, nothing lost."""

from functools import partial

import pytest

from tests.rollout.fakes import FakeGenerator, FakeRecorder, FakeRewarder, FakeSource
from vime.errors import UserError
from vime.observe.metrics import describe
from vime.rollout.conversion import to_rollout_batch
from vime.rollout.evaluation import EvalSet
from vime.rollout.generate import SingleTurn
from vime.rollout.manager import RolloutManager
from vime.rollout.runner import Runner
from vime.rollout.sampling import Sampler
from vime.rollout.saved import load_groups, save_groups, save_if_possible
from vime.types import Sample, SamplingParams, Status

PROMPT = [1, 2, 3]


def make(
    generator=None,
    rewarder=None,
    *,
    concurrency=4,
    eval_sets=(),
    source=None,
    bound=None,
    collect=None,
    source_state=lambda: None,
    look=lambda rollout_id, groups: None,
    save=None,
    **sampling,
):
    generator = generator or FakeGenerator()
    single = SingleTurn(generator, lambda prompt: PROMPT, lambda ids: " ".join(map(str, ids)), max_context=64)

    async def generate(sample, params, evaluation):
        return [await single(sample, params)]

    recorder = FakeRecorder()
    runner = Runner(generate, rewarder or FakeRewarder(), seed=42, concurrency=concurrency)
    params = SamplingParams(max_tokens=8)
    sampler = Sampler(
        source or FakeSource(n=4),
        lambda group, k: runner.run(group, k, params),
        **{"batch_size": 3, "bound": bound} | sampling,
    )
    manager = RolloutManager(
        sampler=sampler,
        runner=runner,
        batch_size=3,
        post_process=lambda samples: ([s.score() for s in samples],) * 2,
        metrics=lambda rollout_id, collected, seconds: {"rollout/groups": float(len(collected.groups))},
        recorder=recorder,
        eval_sets=eval_sets,
        bound=bound,
        collect=collect,
        source_state=source_state,
        look=look,
        save=save,
    )
    return manager, generator, recorder


async def test_who_watches_sees_the_graded_groups_of_each_rollout():
    seen = []
    manager, _, _ = make(look=lambda rollout_id, groups: seen.append((rollout_id, groups)))
    await manager.generate(0)
    ((rollout_id, groups),) = seen
    assert rollout_id == 0 and [len(group) for group in groups] == [4, 4, 4]
    assert all(sample.reward is not None for group in groups for sample in group)


async def test_a_rollout_has_every_sample_of_every_group_whatever_the_order_of_completion():
    manager, _, recorder = make()
    batch = await manager.generate(5)
    assert [s.index for s in batch.samples] == list(range(12))
    assert all(s.tokens[:3] == tuple(PROMPT) and len(s.weight_versions) == s.response_length for s in batch.samples)
    assert batch.metrics == {"rollout/groups": 3.0, "rollout/nonfinite_rewards": 0.0}
    assert len(recorder.recorded["rollout-5"]) == 12


async def test_a_saved_rollout_makes_the_same_batch_again(tmp_path):
    template = str(tmp_path / "new" / "rollout_{rollout_id}.json")
    manager, _, recorder = make(save=partial(save_groups, template))
    batch = await manager.generate(5)
    groups = load_groups(template, 5)
    assert [sample for group in groups for sample in group] == recorder.recorded["rollout-5"]
    again = to_rollout_batch(5, groups, lambda samples: ([s.score() for s in samples],) * 2)
    assert again.samples == batch.samples
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rollout_5.json"]


async def test_a_rollout_that_cannot_be_saved_is_told_and_trained(tmp_path, caplog):
    (tmp_path / "file").touch()
    template = str(tmp_path / "file" / "{rollout_id}.json")
    manager, _, _ = make(save=partial(save_if_possible, template))
    assert len((await manager.generate(5)).samples) == 12
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        f"--save-debug-rollout-data: {tmp_path}/file/5.json is not written: {tmp_path}/file: cannot be written: Not a "
        "directory"
    )


def test_a_file_that_is_not_there_and_one_that_holds_something_else_are_told(tmp_path):
    template = str(tmp_path / "{rollout_id}.json")
    with pytest.raises(UserError, match=r"1\.json: cannot be read: No such file or directory"):
        load_groups(template, 1)
    for content in ('{"a": 1}', "[[", '[{"grade": null}]', "[" * 100_000):
        (tmp_path / "1.json").write_text("[]\n" + content)
        with pytest.raises(UserError, match=r"1\.json:2: no group of samples as --save-debug-rollout-data writes it"):
            load_groups(template, 1)


async def test_tokens_depend_on_identity_not_on_concurrency():
    one, _, _ = make(concurrency=1)
    many, _, _ = make(concurrency=12)
    assert [s.tokens for s in (await one.generate(0)).samples] == [s.tokens for s in (await many.generate(0)).samples]
    again, _, _ = make()
    assert [s.tokens for s in (await again.generate(1)).samples] != [s.tokens for s in (await one.generate(0)).samples]


async def test_concurrency_is_bounded():
    manager, generator, _ = make(concurrency=3)
    await manager.generate(0)
    assert generator.most_in_flight == 3


async def test_the_router_sees_one_session_a_sample():
    manager, generator, _ = make()
    await manager.generate(0)
    assert len({session for _, _, session in generator.requests}) == 12


async def test_groups_are_graded_together_when_asked():
    rewarder = FakeRewarder(by_group=True)
    manager, _, _ = make(rewarder=rewarder)
    await manager.generate(0)
    assert sorted(len(group) for group in rewarder.groups) == [4, 4, 4]


async def test_length_becomes_truncated():
    manager, _, _ = make(FakeGenerator(finish_reason="length"))
    assert all(s.truncated for s in (await manager.generate(0)).samples)


async def test_evaluation_reports_each_set_and_errors_are_counted_not_scored():
    def groups():
        return [[Sample(group_index=0, index=i, prompt="p", label="1") for i in range(4)]]

    sets = [
        EvalSet(name="a", groups=groups, sampling=SamplingParams(max_tokens=4), score=Sample.score),
        EvalSet(name="b", groups=groups, sampling=SamplingParams(max_tokens=4, temperature=0.0), score=Sample.score),
    ]
    rewarder = FakeRewarder(lambda sample: None if sample.index == 3 else float(sample.index > 0))
    manager, generator, recorder = make(rewarder=rewarder, eval_sets=sets)
    metrics = await manager.evaluate(2)
    assert metrics["eval/a"] == pytest.approx(2 / 3) and metrics["eval/a-errors"] == 1 and metrics["eval/a-graded"] == 3
    assert metrics["eval/b-truncated_ratio"] == 0
    assert {params.temperature for _, params, _ in generator.requests} == {0.0, 1.0}
    assert set(recorder.recorded) == {"eval_a-2", "eval_b-2"}
    assert await manager.evaluate(3) == metrics, "the same seeds each time"


async def test_evaluation_says_what_means_may_be_off_by_and_which_weights_answered():
    def groups():
        return [[Sample(group_index=g, index=4 * g + i, prompt="p") for i in range(4)] for g in range(2)]

    sets = [EvalSet(name="a", groups=groups, sampling=SamplingParams(max_tokens=4), score=Sample.score)]
    rewarder = FakeRewarder(lambda sample: float(sample.index in (0, 4, 5, 6)))
    manager, _, _ = make(FakeGenerator(version=7), rewarder, eval_sets=sets)
    metrics = await manager.evaluate(2)
    # prompts have 1 and 3 right of 4; sums of deviations are -1 and 1, so sqrt(2/1 (1 + 1)) / 8 = 0.25
    assert metrics["eval/a"] == 0.5 and metrics["eval/a-ci95"] == pytest.approx(1.959964 * 0.25)
    assert [metrics[f"eval/a-pass@{k}"] for k in (1, 2, 4)] == [0.5, 0.75, 1.0]  # 2: (1 - 3/6 + 1 - 0/6) / 2
    assert metrics["eval/a-pass@2-ci95"] == pytest.approx(1.959964 * 0.25)
    assert metrics["eval/weight_version/min"] == metrics["eval/weight_version/max"] == 7
    assert all(describe(name).name != "eval/{name}" for name in metrics if name != "eval/a")


async def test_an_evaluation_begins_anew_when_all_engines_come_back_with_newer_weights_on_the_way(caplog):
    def groups():
        return [[Sample(group_index=0, index=i, prompt="p") for i in range(4)]]

    class Loses(FakeGenerator):
        """All engines, in the middle of the second set."""

        async def generate(self, token_ids, params, *, session_id):
            if len(self.requests) == 6:
                self.version = 8
                manager.advanced(8, 1)
            return await super().generate(token_ids, params, session_id=session_id)

    sets = [
        EvalSet(name=name, groups=groups, sampling=SamplingParams(max_tokens=4), score=Sample.score) for name in "ab"
    ]
    manager, generator, recorder = make(Loses(version=7), eval_sets=sets)
    manager.synced(7, 7)
    metrics = await manager.evaluate(7)
    assert metrics["eval/weight_version/min"] == metrics["eval/weight_version/max"] == 8
    assert len(generator.requests) == 16, "the set that was answered already is asked again"
    assert [len(samples) for samples in recorder.recorded.values()] == [4, 4]
    assert "after rollout 7 begins anew: the engines have version 8 of the weights, and had 7" in caplog.text


async def test_an_aborted_sample_continues_where_it_stopped():
    generator = FakeGenerator(version=2)
    single = SingleTurn(generator, lambda prompt: PROMPT, str, max_context=64)
    sample = Sample(
        index=0, tokens=[*PROMPT, 9, 9], response_length=2, rollout_log_probs=[-1.0, -1.0], weight_versions=[1, 1]
    )
    await single(sample, SamplingParams(max_tokens=3, seed=1))
    assert generator.requests[0][0] == [*PROMPT, 9, 9] and generator.requests[0][1].max_tokens == 1
    assert sample.weight_versions == [1, 1, 2] and sample.response_length == 3 and sample.status is Status.COMPLETED


async def test_the_context_bounds_the_response_and_a_prompt_that_fills_it_is_an_error():
    generator = FakeGenerator()
    single = SingleTurn(generator, lambda prompt: PROMPT, str, max_context=5)
    await single(Sample(index=0), SamplingParams(max_tokens=50, seed=1))
    assert generator.requests[0][1].max_tokens == 2
    single = SingleTurn(generator, lambda prompt: PROMPT, str, max_context=3)
    with pytest.raises(UserError, match="its prompt has 3 tokens, the context ends at 3"):
        await single(Sample(index=0), SamplingParams(max_tokens=50))
