"""Which reward a sample gets, and how failures are told.

The order: the sample's own ``custom_rm_path``, the run's ``--custom-rm-path``, the row's ``metadata["rm_type"]``,
the run's ``--rm-type``. A reward or Grade that is already there stays, also one that is an error: what waited since an
earlier rollout is not graded twice. Samples that were aborted or failed get none. Nothing here raises for what a reward
function does: the sample's Grade becomes an error with one line that names the function and the sample, and its reward
stays None.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from vime.errors import UserError
from vime.metadata import BadMetadata, checked, without_bad
from vime.plugins import Hook
from vime.plugins.calling import OutOfTime, Raised, guarded, in_time
from vime.ports import GraderPool
from vime.rewards import registry
from vime.rewards.extract import last_boxed
from vime.rewards.remote_rm import RemoteReward
from vime.rewards.values import RewardFailed, set_error, set_value
from vime.types import Sample, Status

T = TypeVar("T")


class RewardSettings(Protocol):
    """The fields of ``config.reward`` that are used here."""

    @property
    def rm_type(self) -> str | None: ...
    @property
    def rm_url(self) -> str | None: ...
    @property
    def reward_key(self) -> str | None: ...
    @property
    def eval_reward_key(self) -> str | None: ...
    @property
    def group_rm(self) -> bool: ...
    @property
    def rm_timeout_s(self) -> float: ...


class RewardHub:
    """Puts rewards on samples. One for a run; close it at the end (the pool belongs to whoever made it).

    Args:
        settings: ``config.reward``.
        pool: where rule graders run.
        args: what custom functions get first, ``config.args``.
        custom_rm: the function of ``--custom-rm-path``; with ``group_rm`` it gets the list of a group's samples.
        resolve: path → function, for samples which carry their own ``custom_rm_path``.
        remote: the reward service, where it is not the one at ``rm_url``.
    """

    def __init__(
        self,
        settings: RewardSettings,
        pool: GraderPool,
        *,
        args: Any = None,
        custom_rm: Hook | None = None,
        resolve: Callable[[str], Hook] | None = None,
        remote: RemoteReward | None = None,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._args = args
        self._custom = custom_rm
        self._resolve = resolve
        self._remote = remote or (RemoteReward(settings.rm_url) if settings.rm_url else None)
        self._own: dict[str, Hook] = {}  # custom_rm_path of samples → function
        if settings.rm_type is not None:
            registry.check(settings.rm_type)

    def sharing(self, settings: RewardSettings, custom_rm: Hook | None) -> RewardHub:
        """Another one, of a set of prompts that is graded in its own way, over the same pool and service."""
        return RewardHub(
            settings, self._pool, args=self._args, custom_rm=custom_rm, resolve=self._resolve, remote=self._remote
        )

    @property
    def by_group(self) -> bool:
        """Whether ``reward_group`` must be called instead of ``reward``."""
        return self._settings.group_rm and self._custom is not None

    async def reward(self, sample: Sample, *, evaluation: bool = False) -> None:
        """Grades one sample in place."""
        if not _is_open(sample):
            return
        if self._is_for_group(sample):
            await self._reward_together([sample], evaluation)
            return
        source = "reward"
        try:
            hook = self._hook_of(sample)
            source = hook.name if hook else self._rm_type(sample)
            put = functools.partial(set_value, sample, reward_key=self._reward_key(evaluation))
            if hook is not None:
                await self._call(hook, sample, evaluation, 1, put)
            else:
                put(await self._grade(source, sample))
        except (RewardFailed, UserError) as error:
            set_error(sample, f"{source}: {error}, for {sample.name}")
        _settle(sample, source)

    async def reward_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        """Grades the samples of one group in place, together where a group function was given."""
        together = [sample for sample in samples if self._is_for_group(sample) and _is_open(sample)]
        alone = [sample for sample in samples if not self._is_for_group(sample)]
        await asyncio.gather(*(self.reward(sample, evaluation=evaluation) for sample in alone))
        if together:
            await self._reward_together(together, evaluation)

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()

    async def _reward_together(self, samples: list[Sample], evaluation: bool) -> None:
        assert self._custom is not None
        source, key = f"{self._custom.name} with --group-rm", self._reward_key(evaluation)
        read = functools.partial(_as_many, count=len(samples))
        try:
            results = await self._call(self._custom, list(samples), evaluation, len(samples), read)
        except RewardFailed as error:
            for sample in samples:
                set_error(sample, f"{source}: {error}, for {sample.name}")
                _settle(sample, source)
            return
        for sample, value in zip(samples, results, strict=True):
            try:
                with guarded():
                    set_value(sample, value, key)
            except Raised as failed:
                set_error(sample, f"{source}: {_explained(self._custom, failed.error)}, for {sample.name}")
            _settle(sample, source)

    async def _grade(self, rm_type: str, sample: Sample) -> Any:
        registry.check(rm_type)
        if rm_type.removeprefix(registry.BOXED) != registry.REMOTE:
            return await self._pool.grade(rm_type, sample.response, sample.label, sample.metadata)
        if self._remote is None:
            raise RewardFailed("needs the address of the reward service by --rm-url")
        boxed = rm_type.startswith(registry.BOXED)
        response = (last_boxed(sample.response) or "") if boxed else sample.response
        return await self._remote.ask(sample.prompt, response, sample.label)

    async def _call(
        self, hook: Hook, what: Sample | list[Sample], evaluation: bool, count: int, read: Callable[[Any], T]
    ) -> T:
        """Calls a user's function, with ``count`` times the deadline of one sample, and reads what it returns.

        Raises:
            RewardFailed: whatever it raised, or ``read`` did.
        """
        timeout_s = self._settings.rm_timeout_s * count
        keywords = {"evaluation": evaluation} if hook.takes("evaluation") else {}
        call = functools.partial(hook.function, self._args, what, **keywords)
        try:
            answer = await in_time(call, timeout_s)
            with guarded():  # out here: of a function that is left behind nothing is read
                return read(answer)
        except OutOfTime:
            raise RewardFailed(f"deadline of {timeout_s:g} s exceeded") from None
        except Raised as failed:
            raise RewardFailed(_explained(hook, failed.error)) from failed.error

    def _is_for_group(self, sample: Sample) -> bool:
        return self.by_group and sample.custom_rm_path is None

    def _hook_of(self, sample: Sample) -> Hook | None:
        path = sample.custom_rm_path
        if path is None:
            return self._custom
        if path not in self._own:
            if self._resolve is None:
                raise RewardFailed(f"the sample's custom_rm_path {path} cannot be resolved here")
            self._own[path] = self._resolve(path)
        return self._own[path]

    def _rm_type(self, sample: Sample) -> str:
        rm_type = sample.metadata.get("rm_type") or self._settings.rm_type
        if rm_type is None:
            raise RewardFailed("set --rm-type or --custom-rm-path, or rm_type in the metadata")
        return str(rm_type)

    def _reward_key(self, evaluation: bool) -> str | None:
        if evaluation and self._settings.eval_reward_key is not None:
            return self._settings.eval_reward_key
        return self._settings.reward_key


def _is_open(sample: Sample) -> bool:
    graded = sample.reward is not None or sample.grade is not None
    return not graded and sample.status not in (Status.ABORTED, Status.FAILED)


def _settle(sample: Sample, source: str) -> None:
    """What a function left in the metadata must be such that it can be kept; what cannot is taken out."""
    try:
        sample.metadata = checked(sample.metadata)
    except BadMetadata as error:
        sample.metadata = without_bad(sample.metadata)
        set_error(sample, f"{source}: left {error}, for {sample.name}")


def _explained(hook: Hook, error: BaseException) -> str:
    return str(error) if isinstance(error, RewardFailed) else hook.explained(error)


def _as_many(results: Any, count: int) -> list[Any]:
    """The list of results.

    Raises:
        RewardFailed: it is none, or of another length.
    """
    if isinstance(results, str | Mapping) or not isinstance(results, Iterable):
        raise RewardFailed(f"must return a list of {count} rewards, not {type(results).__name__}")
    rewards = list(results)
    if len(rewards) != count:
        raise RewardFailed(f"returned {len(rewards)} rewards for {count} samples")
    return rewards
