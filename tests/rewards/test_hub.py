"""Which reward a sample gets; what goes wrong is told and never becomes a 0."""

import asyncio
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest

from tests.plugins import odd
from vime.errors import UserError
from vime.plugins import Hook
from vime.rewards.hub import RewardHub
from vime.types import Grade, GradeStatus, Sample, Status


@dataclass(frozen=True)
class Settings:
    rm_type: str | None = None
    rm_url: str | None = None
    reward_key: str | None = None
    eval_reward_key: str | None = None
    group_rm: bool = False
    rm_timeout_s: float = 5.0


class FakePool:
    """Remembers what it was asked and answers with one Grade."""

    def __init__(self, grade=Grade(score=1.0)):  # noqa: B008 - frozen
        self.grade_given = grade
        self.asked = []

    async def grade(self, rm_type, response, label, metadata):
        self.asked.append(rm_type)
        return self.grade_given

    async def close(self): ...


def sample(index=3, **fields):
    fields = {"status": Status.COMPLETED, "group_index": 1, "rollout_id": 0, "response": "r", "label": "l"} | fields
    return Sample(index=index, **fields)


async def rewarded(hub, one=None, **options):
    one = one or sample()
    await hub.reward(one, **options)
    return one


def returning(value):
    async def custom_rm(args, sample):
        return value

    return custom_rm


def hook(function, log=None):
    return Hook(function, "--custom-rm-path", "my:rm", log)


def custom(function, log=None, **settings):
    return RewardHub(Settings(**settings), FakePool(), custom_rm=hook(function, log))


# --- the order of precedence ---------------------------------------------------------------------


async def test_the_run_s_rm_type_grades():
    pool = FakePool(Grade(score=0.5))
    one = await rewarded(RewardHub(Settings("math"), pool))
    assert (one.reward, one.grade.score, pool.asked) == (0.5, 0.5, ["math"])


async def test_the_row_s_rm_type_comes_before_the_run_s():
    pool = FakePool()
    await rewarded(RewardHub(Settings("math"), pool), sample(metadata={"rm_type": "dapo"}))
    assert pool.asked == ["dapo"]


async def test_the_custom_function_comes_before_rm_types_and_gets_args():
    async def custom_rm(args, sample, **kw):
        return args["bonus"] + sample.index

    hub = RewardHub(Settings("math"), FakePool(), args={"bonus": 10}, custom_rm=hook(custom_rm))
    assert (await rewarded(hub, sample(metadata={"rm_type": "dapo"}))).reward == 13.0


async def test_the_sample_s_own_function_comes_first_even_with_group_rm():
    hub = RewardHub(
        Settings(group_rm=True), FakePool(), custom_rm=hook(returning([1.0])), resolve=lambda path: hook(returning(7.0))
    )
    samples = [sample(0, custom_rm_path="mine:f"), sample(1)]
    await hub.reward_group(samples)
    assert [one.reward for one in samples] == [7.0, 1.0]


@pytest.mark.parametrize("fields", [{"reward": 0.25}, {"status": Status.ABORTED}, {"status": Status.FAILED}])
async def test_a_given_reward_stays_and_aborted_or_failed_samples_get_none(fields):
    one = await rewarded(custom(returning(9.0)), sample(**fields))
    assert one.reward == fields.get("reward")


async def test_a_grading_that_failed_is_not_repeated_when_the_sample_waited_for_a_later_rollout():
    hub = RewardHub(Settings(), FakePool(), custom_rm=hook(returning(math.nan)))
    one = await rewarded(hub)
    failed = one.grade
    better = RewardHub(Settings(), FakePool(), custom_rm=hook(returning(1.0)))
    assert (await rewarded(better, one)).grade is failed and one.reward is None


async def test_a_truncated_sample_is_graded():
    assert (await rewarded(custom(returning(9.0)), sample(status=Status.TRUNCATED))).reward == 9.0


async def test_evaluation_is_passed_to_functions_that_name_it():
    async def custom_rm(args, sample, evaluation):
        return 1.0 if evaluation else 2.0

    hub = custom(custom_rm)
    assert (await rewarded(hub, evaluation=True)).reward == 1.0
    assert (await rewarded(hub)).reward == 2.0


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(0.5), 0.5), (Grade(score=2.0), 2.0)]
)
async def test_numbers_are_rewards(value, reward):
    one = await rewarded(custom(returning(value)))
    assert one.score() == reward
    assert type(one.reward) is float


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (math.nan, "must be finite, not nan"),
        (math.inf, "must be finite, not inf"),
        (None, "must be a number, not None"),
        ("1", "must be a number, not '1'"),
        ([1.0], "must be a number, not [1.0]"),
        ({"score": 1.0}, "is a dict with ['score']; name the key to train on by --reward-key"),
    ],
)
async def test_what_is_no_finite_number_is_an_error_that_names_function_and_sample(value, what):
    one = await rewarded(custom(returning(value)))
    assert one.reward is None
    assert one.grade.status is GradeStatus.ERROR
    assert one.grade.detail == f"--custom-rm-path my:rm: the reward {what}, for sample 3 (group 1, rollout 1)"


async def test_a_dict_reward_keeps_its_values_and_reward_key_names_the_score():
    one = await rewarded(custom(returning({"acc": True, "len": 5}), reward_key="acc"))
    assert one.reward == {"acc": 1.0, "len": 5}
    assert one.score("acc") == 1.0


async def test_a_dict_without_the_reward_key_is_an_error():
    one = await rewarded(custom(returning({"len": 5}), reward_key="acc"))
    assert "has no key 'acc' (--reward-key), only ['len']" in one.grade.detail


async def test_evaluation_may_have_a_key_of_its_own():
    hub = custom(returning({"a": 1.0, "b": 2.0}), reward_key="a", eval_reward_key="b")
    assert (await rewarded(hub, evaluation=True)).grade.score == 2.0


async def test_dapo_s_further_values_make_a_dict_only_where_a_key_asks_for_one():
    pool = FakePool(Grade(score=-1.0, extra={"acc": False, "pred": "3"}))
    assert (await rewarded(RewardHub(Settings("dapo"), pool))).reward == -1.0
    one = await rewarded(RewardHub(Settings("dapo", reward_key="score"), pool))
    assert one.reward == {"score": -1.0, "acc": False, "pred": "3"}


async def test_an_error_of_a_grader_leaves_no_reward():
    one = await rewarded(RewardHub(Settings("math"), FakePool(Grade.error("deadline of 5 s exceeded"))))
    assert (one.reward, one.grade.detail) == (None, "deadline of 5 s exceeded")


# --- failures of functions ---------------------------------------------------------------------------


async def test_an_exception_is_an_error_with_its_message_and_its_traceback_is_in_the_log(tmp_path):
    async def custom_rm(args, sample):
        raise KeyError("tests")

    log = tmp_path / "logs" / "custom_functions.log"
    one = await rewarded(custom(custom_rm, log))
    line = custom_rm.__code__.co_firstlineno + 1
    assert one.grade.detail == (
        f"--custom-rm-path my:rm: raised KeyError: 'tests' (test_hub.py:{line}), traceback in {log}, "
        "for sample 3 (group 1, rollout 1)"
    )
    assert log.read_text().startswith("--custom-rm-path my:rm\nTraceback (most recent call last):\n")
    assert 'raise KeyError("tests")' in log.read_text()


async def test_a_function_that_sleeps_for_an_hour_is_an_error_after_its_deadline():
    async def custom_rm(args, sample):
        await asyncio.sleep(3600)

    one = await rewarded(custom(custom_rm, rm_timeout_s=0.05))
    assert "deadline of 0.05 s exceeded" in one.grade.detail


async def test_a_function_that_will_not_end_is_an_error_after_its_deadline_too(monkeypatch):
    async with odd.stubbornness(monkeypatch):
        one = await rewarded(custom(odd.will_not_end, rm_timeout_s=0.05))
        (two,) = await grouped(odd.will_not_end, [sample()], rm_timeout_s=0.05)
    assert "deadline of 0.05 s exceeded" in one.grade.detail
    assert "deadline of 0.05 s exceeded" in two.grade.detail


async def test_what_a_function_says_after_its_deadline_is_not_heard(monkeypatch):
    monkeypatch.setattr("vime.plugins.calling.GRACE_S", 0.01)
    said = asyncio.Event()

    async def custom_rm(args, sample):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            said.set()
            return 1.0

    one = await rewarded(custom(custom_rm, rm_timeout_s=0.01))
    await said.wait()
    await asyncio.sleep(0)
    assert one.reward is None and "deadline of 0.01 s exceeded" in one.grade.detail


@pytest.mark.parametrize(("function", "told"), odd.PLAIN.items(), ids=lambda value: getattr(value, "__name__", ""))
async def test_whatever_a_function_raises_is_an_error_of_the_sample(function, told):
    async def custom_rm(args, sample):
        function()

    one = await rewarded(custom(custom_rm))
    assert one.grade.detail.startswith(f"--custom-rm-path my:rm: {told}")
    (two,) = await grouped(custom_rm, [sample()])
    assert two.grade.detail.startswith(f"--custom-rm-path my:rm with --group-rm: {told}")


async def test_a_cancellation_that_a_function_made_itself_is_an_error_of_the_sample():
    async def custom_rm(args, sample):
        await odd.awaits_what_it_cancelled()

    assert "my:rm: raised CancelledError" in (await rewarded(custom(custom_rm))).grade.detail


@pytest.mark.parametrize("value", [{1: 1.0, "a": 2.0}, odd.MuteMapping()])
async def test_a_reward_that_cannot_even_be_read_is_an_error_of_the_sample(value):
    one = await rewarded(custom(returning(value)))
    (two,) = await grouped(returning([value]), [sample()])
    for each in (one, two):
        assert each.grade.status is GradeStatus.ERROR and "my:rm" in each.grade.detail


async def test_cancelling_passes_through():
    async def custom_rm(args, sample):
        await asyncio.sleep(3600)

    task = asyncio.create_task(rewarded(custom(custom_rm)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_unknown_rm_type_is_refused_at_once():
    with pytest.raises(UserError, match="did you mean 'math'"):
        RewardHub(Settings("maths"), FakePool())


@pytest.mark.parametrize(
    ("settings", "fields", "what"),
    [
        (Settings(), {}, "set --rm-type or --custom-rm-path"),
        (Settings(), {"metadata": {"rm_type": "maths"}}, "no grader 'maths'"),
        (Settings("remote_rm"), {}, "needs the address of the reward service by --rm-url"),
        (Settings(), {"custom_rm_path": "a:b"}, "cannot be resolved"),
    ],
)
async def test_a_sample_that_nothing_can_grade_says_why(settings, fields, what):
    assert what in (await rewarded(RewardHub(settings, FakePool()), sample(**fields))).grade.detail


# --- groups ---------------------------------------------------------------------------------------------


async def grouped(function, samples, **settings):
    hub = custom(function, **({"group_rm": True} | settings))
    await hub.reward_group(samples)
    return samples


async def test_a_group_function_gets_the_open_samples_and_its_rewards_are_dealt_in_order():
    async def custom_rm(args, samples):
        return [float(one.index) for one in samples]

    samples = [sample(0), sample(1, status=Status.ABORTED), sample(2, reward=9.0), sample(3)]
    assert [one.reward for one in await grouped(custom_rm, samples)] == [0.0, None, 9.0, 3.0]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([1.0], "returned 1 rewards for 2 samples"),
        (1.0, "must return a list of 2 rewards, not float"),
        ({"a": 1}, "must return a list of 2 rewards, not dict"),
        (None, "must return a list of 2 rewards, not NoneType"),
    ],
)
async def test_a_wrong_number_of_rewards_is_an_error_for_every_sample(value, what):
    samples = await grouped(returning(value), [sample(0), sample(1)])
    assert all(f"--custom-rm-path my:rm with --group-rm: {what}" in one.grade.detail for one in samples)


async def test_one_bad_reward_of_a_group_spoils_only_its_own_sample():
    samples = await grouped(returning([1.0, math.nan]), [sample(0), sample(1)])
    assert [one.reward for one in samples] == [1.0, None]


async def test_without_a_group_function_samples_are_graded_one_by_one():
    pool = FakePool()
    hub = RewardHub(Settings("math", group_rm=True), pool)
    assert not hub.by_group
    await hub.reward_group([sample(0), sample(1)])
    assert pool.asked == ["math", "math"]


async def test_a_single_sample_still_reaches_a_group_function_as_a_list():
    hub = custom(returning([4.0]), group_rm=True)
    assert (await rewarded(hub)).reward == 4.0


# --- what is kept with a sample ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [({(1, 2): 3}, "has '(1, 2)' (tuple) as a key"), ({"open": open}, "metadata['open'] is of type builtin_function")],
)
async def test_metadata_that_cannot_be_kept_is_an_error_of_the_sample_whose_reward_left_it(value, message):
    async def custom_rm(args, one):
        one.metadata |= value
        return 1.0

    async def group_rm(args, samples):
        return [await custom_rm(args, one) for one in samples]

    one = await rewarded(custom(custom_rm), sample(metadata={"row": 1}))
    (two,) = await grouped(group_rm, [sample(metadata={"row": 1})])
    for each in (one, two):
        assert each.grade.status is GradeStatus.ERROR and each.reward is None
        assert "my:rm" in each.grade.detail and "left metadata" in each.grade.detail and message in each.grade.detail
        assert each.metadata == {"row": 1}


async def test_numbers_beside_a_reward_that_are_not_finite_become_null_and_others_plain():
    given = {"score": 1.0, "loss": math.nan, "acc": np.float32(0.5)}
    one = await rewarded(custom(returning(given), reward_key="score"))
    assert one.reward == {"score": 1.0, "loss": None, "acc": 0.5}
    json.dumps(one.reward, allow_nan=False)
    two = await rewarded(custom(returning({"score": 1.0, "by": {1: 2}}), reward_key="score"))
    assert "my:rm: the reward['by'] has '1' (int) as a key" in two.grade.detail
