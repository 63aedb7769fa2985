"""One group at a time: engines that are lost, answers that are interrupted, hooks and masks."""

import asyncio

import aiohttp
import pytest

from tests.rollout.fakes import FakeGenerator, FakeRewarder
from tests.rollout.worlds import on_virtual_clock
from vime.errors import EngineError
from vime.plugins.hook import Hook, HookError
from vime.rollout.generate import SingleTurn
from vime.rollout.hooks import custom_generate, sample_hook
from vime.rollout.runner import Gate, Runner
from vime.serving.http import Refused
from vime.types import Generation, Sample, SamplingParams, Status

PARAMS = SamplingParams(max_tokens=8)


def runner_of(function, rewarder=None, **options):
    generate = custom_generate(Hook(function, "--custom-generate-function-path", "mine:f"), None)
    return Runner(generate, rewarder or FakeRewarder(), seed=1, concurrency=8, **options)


def fresh(count=1):
    return [Sample(index=i, group_index=0, prompt="p", metadata={"list": []}) for i in range(count)]


def fill(sample, length=2):
    sample.tokens, sample.response_length, sample.status = [1, *range(5, 5 + length)], length, Status.COMPLETED
    return sample


# --- engines that are lost --------------------------------------------------------------------------------


LOSSES = [EngineError("engine 0 is gone"), ConnectionResetError(), aiohttp.ServerDisconnectedError(), TimeoutError()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_a_custom_function_is_called_again_with_the_sample_as_it_was_before_the_call(loss):
    seen = []

    async def generate(args, sample, sampling_params):
        seen.append((list(sample.tokens), list(sample.metadata["list"]), sampling_params["seed"]))
        sample.metadata["list"].append(1)
        sample.tokens += [4, 4, 4]
        if len(seen) < 3:
            raise loss
        return fill(sample)

    async def live():
        runner, group = runner_of(generate, requeues=5), fresh()
        await runner.run(group, 0, PARAMS)
        return group, runner.pop_metrics(), asyncio.get_running_loop().time()

    (sample,), metrics, took = on_virtual_clock(live)
    assert sample.tokens == [1, 5, 6] and sample.metadata == {"list": [1]}
    assert len(seen) == 3 and len({repr(each) for each in seen}) == 1, "the same sample and the same seed each time"
    assert metrics["rollout/samples/requeued"] == 2 and took == 1 + 2


def test_what_blames_the_request_is_raised():
    class Wrong:
        async def __call__(self, sample, params, evaluation):
            raise Refused("engine 0 answered 400: the prompt is too long", 400)

    async def live():
        await Runner(Wrong(), FakeRewarder(), seed=1, concurrency=1, requeues=5).run(fresh(), 0, PARAMS)

    with pytest.raises(Refused, match="too long"):
        on_virtual_clock(live)


def test_a_mistake_of_a_custom_function_is_raised():
    async def generate(args, sample, sampling_params):
        raise KeyError("answer")

    async def live():
        await runner_of(generate, requeues=5).run(fresh(), 0, PARAMS)

    with pytest.raises(HookError, match="raised KeyError"):
        on_virtual_clock(live)


def test_a_sample_that_no_engine_finishes_fails_and_its_siblings_do_not():
    async def generate(args, sample, sampling_params):
        if sample.index == 1:
            raise EngineError("engine 0 is gone")
        return fill(sample)

    async def live():
        runner, group = runner_of(generate, requeues=2), fresh(3)
        return await runner.run(group, 4, PARAMS), runner.pop_metrics()

    group, metrics = on_virtual_clock(live)
    assert [sample.status.value for sample in group] == ["completed", "failed", "completed"]
    assert metrics == {
        "rollout/samples/continued": 0.0,
        "rollout/samples/requeued": 2.0,
        "rollout/samples/given_up": 1.0,
    }


# --- answers that are interrupted ---------------------------------------------------------------------------


class Endless(FakeGenerator):
    """Samples a token a second until it is told to stop."""

    def __init__(self):
        super().__init__()
        self.stopped = asyncio.Event()

    async def generate(self, token_ids, params, *, session_id):
        begin = asyncio.get_running_loop().time()
        await self.stopped.wait()
        count = int(asyncio.get_running_loop().time() - begin)
        return Generation(
            token_ids=[3] * count, log_probs=[-1.0] * count, weight_versions=[1] * count, finish_reason="abort"
        )

    async def abort(self):
        self.stopped.set()


def test_an_interrupted_answer_is_neither_shown_to_hooks_nor_graded():
    shown = []

    async def hook(sample, evaluation):
        shown.append(sample.index)
        return sample

    async def live():
        gate = Gate(Endless())
        single = SingleTurn(gate, lambda prompt: [7], str, max_context=99)

        async def generate(sample, params, evaluation):
            return [await single(sample, params)]

        runner = Runner(generate, FakeRewarder(), seed=1, concurrency=1, hooks=[hook], gate=gate)
        group = fresh(2)
        running = asyncio.ensure_future(runner.run(group, 0, PARAMS))
        await asyncio.sleep(5)
        async with runner.halt():
            await running
        return group

    first, second = on_virtual_clock(live)
    assert (first.status, first.tokens, first.reward) == (Status.ABORTED, [7, 3, 3, 3, 3, 3], None)
    assert second.status is Status.PENDING, "it had not begun"
    assert shown == []


def test_a_custom_function_that_does_not_end_in_time_is_begun_anew_later():
    async def generate(args, sample, sampling_params):
        sample.metadata["list"].append("half done")
        await asyncio.sleep(1000)

    async def live():
        runner, group = runner_of(generate), fresh()
        running = asyncio.ensure_future(runner.run(group, 0, PARAMS))
        await asyncio.sleep(1)
        async with runner.halt():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return group, asyncio.get_running_loop().time()

    (sample,), took = on_virtual_clock(live)
    assert sample == fresh()[0] and took == 6


def test_children_of_an_interrupted_call_are_given_up_for_the_sample_that_was_drawn():
    async def generate(args, sample, sampling_params):
        await asyncio.sleep(2)
        other = fill(sample.copy())
        sample.status = Status.ABORTED
        return [sample, other]

    async def live():
        runner, group = runner_of(generate), fresh()
        running = asyncio.ensure_future(runner.run(group, 0, PARAMS))
        await asyncio.sleep(1)
        async with runner.halt():
            await running
        return group

    assert on_virtual_clock(live) == fresh()


def test_an_evaluation_is_not_halted():
    async def live():
        async def slow(args, sample, sampling_params):
            await asyncio.sleep(100)
            return fill(sample)

        runner, group = runner_of(slow), fresh()

        async def evaluate():
            async with runner.undisturbed():
                await runner.run(group, 0, PARAMS, "math")

        evaluation = asyncio.ensure_future(evaluate())
        await asyncio.sleep(1)
        async with runner.halt():
            return group[0].status, evaluation.done()

    assert on_virtual_clock(live) == (Status.COMPLETED, True)


def test_what_was_sampled_before_an_interruption_can_be_masked():
    async def live():
        single = SingleTurn(FakeGenerator(version=2), lambda prompt: [7], str, max_context=99)

        async def generate(sample, params, evaluation):
            return [await single(sample, params)]

        begun = Sample(index=0, group_index=0, tokens=[7, 3, 3], response_length=2, status=Status.ABORTED)
        begun.rollout_log_probs, begun.weight_versions = [-1.0, -1.0], [1, 1]
        runner = Runner(generate, FakeRewarder(), seed=1, concurrency=1, masks_continued=True)
        return (await runner.run([begun, *fresh()], 3, PARAMS)), runner.pop_metrics()

    (begun, other), metrics = on_virtual_clock(live)
    new = begun.response_length - 2
    assert begun.loss_mask == [0, 0] + [1] * new and begun.weight_versions == [1, 1] + [2] * new
    assert other.loss_mask is None
    assert metrics["rollout/samples/continued"] == 1


# --- sample hooks -------------------------------------------------------------------------------------------


def test_a_complete_answer_whose_hook_is_slow_waits_as_it_was_generated_and_is_never_generated_again():
    calls = []

    async def generate(args, sample, sampling_params):
        calls.append("generate")
        return fill(sample)

    async def judge(sample, evaluation):
        calls.append("first hook")
        sample.metadata["list"].append("half done")
        await asyncio.sleep(100 if len(calls) == 2 else 0)
        return sample

    async def last(sample, evaluation):
        calls.append("last hook")
        return sample

    async def live():
        runner, group = runner_of(generate, hooks=[judge, last]), fresh()
        running = asyncio.ensure_future(runner.run(group, 0, PARAMS))
        await asyncio.sleep(1)
        async with runner.halt():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        took, (waiting,) = asyncio.get_running_loop().time(), group
        waits = (waiting.status, waiting.awaits_hooks, list(waiting.metadata["list"]), waiting.reward)
        await runner.run(group, 1, PARAMS)
        return took, waits, group

    took, waits, (sample,) = on_virtual_clock(live)
    assert took == 1, "an abort does not wait for hooks"
    assert waits == (Status.COMPLETED, True, [], None)
    assert calls == ["generate", "first hook", "first hook", "last hook"]
    assert sample.metadata == {"list": ["half done"]} and sample.reward == 0.0 and not sample.awaits_hooks


def test_a_hook_that_loses_its_engine_is_called_again_and_the_answer_is_not_generated_again():
    calls = []

    async def generate(args, sample, sampling_params):
        calls.append("generate")
        return fill(sample)

    async def judge(sample, evaluation):
        calls.append("hook")
        sample.metadata["list"].append(1)
        if len(calls) == 2:
            raise EngineError("engine 0 is gone")
        return sample

    async def live():
        runner, group = runner_of(generate, hooks=[judge], requeues=1), fresh()
        await runner.run(group, 0, PARAMS)
        return group, runner.pop_metrics()

    (sample,), metrics = on_virtual_clock(live)
    assert calls == ["generate", "hook", "hook"] and sample.metadata == {"list": [1]}
    assert metrics["rollout/samples/requeued"] == 1


# --- functions that never return ----------------------------------------------------------------------------


def test_a_generate_function_or_hook_has_a_deadline_for_each_sample():
    async def stuck(args, sample, *rest, **keywords):
        await asyncio.Event().wait()

    async def done(args, sample, sampling_params):
        return fill(sample)

    async def live(requeues, generate, *hooks):
        hooks = [sample_hook(Hook(each, "--rollout-sample-hook", "mine:h"), None, timeout_s=50) for each in hooks]
        generate = custom_generate(Hook(generate, "--custom-generate-function-path", "mine:f"), None, timeout_s=50)
        runner = Runner(generate, FakeRewarder(), seed=1, concurrency=8, hooks=hooks, requeues=requeues)
        await runner.run(fresh(), 0, PARAMS)

    late = r"did not return within --rollout-function-timeout-s 50, for sample 0"
    for requeues in (None, 3):
        with pytest.raises(HookError, match=f"custom-generate-function-path mine:f: {late}"):
            on_virtual_clock(lambda requeues=requeues: live(requeues, stuck))
        with pytest.raises(HookError, match=f"rollout-sample-hook mine:h: {late}"):
            on_virtual_clock(lambda requeues=requeues: live(requeues, done, stuck))


def test_a_service_of_a_function_that_is_taken_for_a_lost_engine_is_named_at_once(caplog):
    calls = []

    async def generate(args, sample, sampling_params):
        calls.append(1)
        if len(calls) < 3:
            raise TimeoutError("the search service did not answer")
        return fill(sample)

    on_virtual_clock(lambda: runner_of(generate, requeues=5).run(fresh(), 0, PARAMS))
    (told,) = [record.message for record in caplog.records]
    assert "sample 0" in told and "the search service did not answer" in told
