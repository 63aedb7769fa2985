"""The sampler: keeps groups in flight until a rollout has enough of them. It lives as long as the run.

Invariants:
* every group that is drawn ends exactly once: it is trained, dropped for a reason, or given back to the source. Until
  then it is in flight, also between rollouts. ``Ledger`` counts, and its counts add up whenever a rollout is collected;
* groups that finish after a rollout has all it needs are never thrown away;
* no task outlives ``close``, and an error closes; the state then still has every group that was in flight;
* what a rollout gets is ordered by group index. With ``in_order`` it also does not depend on who finishes first.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from vime.data.codec import sample_from_json, sample_to_json
from vime.errors import UserError
from vime.naming import rollout_name
from vime.plugins.answers import Kept
from vime.ports import DataSource
from vime.rollout.staleness import StalenessBound
from vime.rollout.tasks import cancel_all
from vime.types import Group, Status

RunGroup = Callable[[Group, int], Awaitable[Group]]
"""(group, rollout_id) → the group, generated and graded. It is filled in place, one finished stage after the other."""

Judge = Callable[[Group], Kept]
"""Whether a finished group counts."""

Halt = Callable[[], AbstractAsyncContextManager[None]]
"""A block in which nothing is generated; on entry what was under way has ended, with what it had."""

MAX_REFILLS = 32

TELL_S = 600.0
"""How long nothing may end before a rollout says what it waits for."""

TOLD = 8
"""Groups that are named then."""

logger = logging.getLogger(__name__)


def keep_all(group: Group) -> Kept:
    """The judge where no filter was given."""
    return Kept(keep=True)


def not_failed(judge: Judge) -> Judge:
    """Groups of which nothing is left but failures do not count either."""

    def judged(group: Group) -> Kept:
        if all(sample.status is Status.FAILED for sample in group):
            return Kept(keep=False, reason="failed")
        return judge(group)

    return judged


class InFlight(enum.Enum):
    """What becomes of groups that are still in flight when a rollout has all it needs."""

    ABORT = "abort"  # they end now, and are continued later: partial rollouts
    RESTART = "restart"  # they end now, and their prompts are answered anew later
    FINISH = "finish"  # they are waited for
    LEAVE = "leave"  # they run on


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A finished group that does not count."""

    group: Group
    reason: str


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The closed groups of a rollout."""

    groups: list[Group]
    dropped: Sequence[Dropped] = ()
    late: Sequence[Group] = ()  # finished too, but too late to be used; their prompts went back to the source
    metrics: Mapping[str, float] = field(default_factory=dict)  # beside those that are made from the groups


@dataclass(kw_only=True)
class Ledger:
    """What became of the groups drawn since the start of the run."""

    drawn: int = 0  # a group that comes back from the source is drawn once more
    trained: int = 0
    returned: int = 0  # to the source
    dropped: Counter[str] = field(default_factory=Counter)  # by reason

    @property
    def in_flight(self) -> int:
        return self.drawn - self.trained - self.returned - self.dropped.total()

    def metrics(self, before: Ledger) -> dict[str, float]:
        """What has happened since ``before``."""
        dropped = self.dropped - before.dropped
        counts = {
            "drawn": self.drawn - before.drawn,
            "trained": self.trained - before.trained,
            "returned": self.returned - before.returned,
            "dropped": dropped.total(),
            "in_flight": self.in_flight,
            **{f"dropped/{reason}": count for reason, count in dropped.items()},
        }
        return {f"rollout/groups/{name}": float(count) for name, count in counts.items()}

    def copy(self) -> Ledger:
        return Ledger.from_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "drawn": self.drawn,
            "trained": self.trained,
            "returned": self.returned,
            "dropped": dict(self.dropped),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Ledger:
        return cls(**{**state, "dropped": Counter(state["dropped"])})


@dataclass(eq=False, kw_only=True)
class _Flight:
    """A group in flight."""

    origin: Group  # its samples as they were drawn
    group: Group  # its samples as they are now
    task: asyncio.Task[Group]
    deadline: int  # the last rollout that may use it

    @property
    def is_generated(self) -> bool:
        """Whether nothing is left to sample, though perhaps to grade."""
        return not any(sample.is_unfinished for sample in self.group)

    def to_json(self) -> list[dict[str, Any]]:
        """As it is now; as it was where that cannot be kept, which is an error when the group is judged, not here."""
        try:
            return _to_json(self.group)
        except UserError:
            return _to_json(self.origin)


@dataclass(kw_only=True)
class _Rollout:
    """A rollout that is being collected."""

    number: int
    target: int
    drawn: int = 0
    kept: list[Group] = field(default_factory=list)
    spare: list[Dropped] = field(default_factory=list)  # may fill the batch when too few are kept
    dropped: list[Dropped] = field(default_factory=list)
    late: list[Group] = field(default_factory=list)  # went back to be sampled anew
    awaited: list[_Flight] | None = None  # of those that were in flight when spare ones could first fill it

    @property
    def short(self) -> int:
        """How many groups are missing even with the spare ones."""
        return self.target - len(self.kept) - len(self.spare)

    def rivals(self, flights: list[_Flight]) -> list[_Flight]:
        """Those that may get a place in it."""
        return flights if self.awaited is None else self.awaited

    @property
    def groups(self) -> list[Group]:
        """Those that may be its groups."""
        return self.kept + [spare.group for spare in self.spare]


class Sampler:
    """Draws groups, runs them concurrently, and keeps those that count.

    Args:
        source: where groups come from, and where unfinished ones and surplus ones go back.
        run: generates and grades one group.
        batch_size: how many groups are drawn at a time, or kept in flight.
        judge: whether a finished group counts; one that does not is replaced.
        in_flight: what becomes of groups that a rollout does not wait for.
        halt: how ``ABORT`` and ``RESTART`` end generation.
        in_order: groups are judged in the order in which they were drawn.
        max_refills: how many more batches a rollout may draw because of groups that do not count.
        bound: how far sampling may run ahead of training; ``admission_changed`` asks again.
        continuous: ``batch_size`` groups are kept in flight, also where this rollout needs fewer, and between rollouts.
    """

    def __init__(
        self,
        source: DataSource,
        run: RunGroup,
        *,
        batch_size: int,
        judge: Judge = keep_all,
        in_flight: InFlight = InFlight.RESTART,
        halt: Halt = lambda: nullcontext(),
        in_order: bool = False,
        max_refills: int = MAX_REFILLS,
        bound: StalenessBound | None = None,
        continuous: bool = False,
    ) -> None:
        self._source = source
        self._run = run
        self._batch_size = batch_size
        self._judge = judge
        self._in_flight = in_flight
        self._halt = halt
        self._in_order = in_order
        self._max_refills = max_refills
        self._bound = bound or StalenessBound()
        self._continuous = continuous
        self._flights: list[_Flight] = []  # in the order in which they were drawn
        self._restored: list[Group] = []  # of a checkpoint, or of what an error ended: in flight, but not started yet
        self._rollout: _Rollout | None = None
        self._filling: asyncio.Task[None] | None = None  # between rollouts, where it is continuous
        self._changed = asyncio.Event()
        self.ledger = Ledger()
        self._reported = self._reported_before = Ledger()  # the ledger after the last rollout, and after the one before

    async def collect(self, rollout_id: int, target: int) -> Collected:
        """``target`` groups that count. What one group raises ends the call, and all groups in flight, with it.

        Raises:
            UserError: too few groups count, or the source has none.
        """
        assert self._rollout is None, "one rollout is collected at a time"
        self._rollout = rollout = _Rollout(number=rollout_id, target=target)
        try:
            await self._end_filling()
            self._changed.set()  # groups may have finished since the last rollout
            while not self._is_full(rollout):
                self._fill(rollout)
                await self._change(rollout)
                landed = [flight for flight in self._landed() if flight in rollout.rivals(self._flights)]
                for flight in itertools.takewhile(lambda each: self._may_take(each, rollout), landed):
                    self._close(flight, rollout)
            await self._settle(rollout_id)
            collected = self._collected(rollout)
        except BaseException:
            self._restored = [*rollout.groups, *self._restored]
            await self.close()
            raise
        finally:
            self._rollout = None
        if self._continuous:
            self._filling = asyncio.ensure_future(self._keep_filled(_Rollout(number=rollout_id + 1, target=target)))
        return collected

    async def _change(self, rollout: _Rollout) -> None:
        """Returns when there may be something to do."""
        while not self._changed.is_set():
            try:
                async with asyncio.timeout(TELL_S):
                    await self._changed.wait()
            except TimeoutError:
                waiting = [flight.task.get_name() for flight in self._flights if not flight.task.done()]
                if waiting:
                    told = ", ".join(waiting[:TOLD]) + (f" and {len(waiting) - TOLD} more" if waiting[TOLD:] else "")
                    logger.warning(
                        "%s: nothing has ended for %g s; under way: %s", rollout_name(rollout.number), TELL_S, told
                    )
        self._changed.clear()

    async def _keep_filled(self, rollout: _Rollout) -> None:
        """Starts groups for a rollout that nobody collects yet."""
        while True:
            self._fill(rollout)
            await self._changed.wait()
            self._changed.clear()

    async def _end_filling(self) -> None:
        """What it raised is raised here."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.cancel()
            await asyncio.wait([filling])
            if not filling.cancelled():
                filling.result()

    def admission_changed(self) -> None:
        """The bound may have other answers now."""
        self._changed.set()

    async def close(self) -> None:
        """Ends all groups in flight. The state still has them; nothing more can be collected."""
        filling, self._filling = self._filling, None
        await cancel_all([*(flight.task for flight in self._flights), *([filling] if filling is not None else [])])

    def state_dict(self, untrained: Sequence[Group] = ()) -> dict[str, Any]:
        """What a run that goes on from here must know, as JSON values.

        Args:
            untrained: groups that were collected, and that the checkpoint's weights have not learned from yet.
        """
        groups = [*untrained, *self._restored]
        if self._rollout is not None:
            groups += self._rollout.groups
        return {
            "groups": [_to_json(group) for group in groups] + [flight.to_json() for flight in self._flights],
            "ledger": self.ledger.to_json() | {"trained": self.ledger.trained - len(untrained)},
            "reported": (self._reported_before if untrained else self._reported).to_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken: groups that were in flight start first, with what they had."""
        self._restored = [[sample_from_json(record) for record in group] for group in state["groups"]]
        self.ledger = Ledger.from_json(state["ledger"])
        self._reported = self._reported_before = Ledger.from_json(state["reported"])

    def _is_full(self, rollout: _Rollout) -> bool:
        """Spare groups fill the batch when all have ended that were in flight when there were enough of them."""
        if len(rollout.kept) == rollout.target:
            return True
        return rollout.short <= 0 and not rollout.awaited

    def _fill(self, rollout: _Rollout) -> None:
        """Starts as many groups as the rollout needs and the bound allows."""
        wanted = len(self._restored) + self._wanted(rollout)
        deadlines = [flight.deadline for flight in self._flights]
        count = min(wanted, self._bound.may_start(rollout.number, max(rollout.short, 0), deadlines))
        while count > 0 and self._restored:
            self._start(self._restored.pop(0), rollout.number)
            count -= 1
        while count > 0:
            drawn = self._draw(count, rollout)
            for group in drawn:
                self._start(group, rollout.number)
            count = count - len(drawn) if drawn else 0

    def _wanted(self, rollout: _Rollout) -> int:
        """How many groups to draw: a batch where some are missing, or what keeps a batch in flight."""
        waiting, batch = len(self._flights) + len(self._restored), self._batch_size
        wanted = max(batch - waiting, 0) if self._continuous else batch * (rollout.short > self._on_their_way(rollout))
        if rollout.drawn < max(batch, rollout.target) + self._max_refills * batch:
            return wanted
        if wanted and not waiting:
            raise UserError(self._too_few(rollout))
        return 0

    def _on_their_way(self, rollout: _Rollout) -> int:
        """How many groups may still come in time."""
        deadlines = [flight.deadline for flight in self._flights]
        return len(self._restored) + self._bound.claims(rollout.number, max(rollout.short, 0), deadlines)

    def _draw(self, count: int, rollout: _Rollout) -> list[Group]:
        """Fresh groups, at most so many; none if the source has none, and others are in flight."""
        drawn = self._source.get_samples(count)
        if not drawn and not self._flights:
            raise UserError(f"{rollout_name(rollout.number)}: the data source gave no groups where {count} were wanted")
        rollout.drawn += len(drawn)
        self.ledger.drawn += len(drawn)
        return drawn

    def _start(self, group: Group, rollout_id: int) -> None:
        now = list(group)
        task = asyncio.ensure_future(self._run(now, rollout_id))
        task.set_name(f"group {group[0].group_index}")
        task.add_done_callback(lambda _: self._changed.set())
        self._flights.append(_Flight(origin=group, group=now, task=task, deadline=self._bound.deadline(group)))

    def _landed(self) -> list[_Flight]:
        """The finished groups that may be judged, the most urgent first; raises what a group raised."""
        done = sorted((flight for flight in self._flights if flight.task.done()), key=lambda each: each.deadline)
        for flight in done:
            flight.group = flight.task.result()
        if self._in_order:
            return list(itertools.takewhile(lambda flight: flight.task.done(), self._flights))
        return done

    def _may_take(self, flight: _Flight, rollout: _Rollout) -> bool:
        """Whether there is a place, and all others are in time without it. The oldest need not ask."""
        if self._is_full(rollout):
            return False
        others = [each.deadline for each in rollout.rivals(self._flights) if each is not flight]
        is_oldest = flight.deadline <= min(others, default=flight.deadline)
        return is_oldest or self._bound.has_room(rollout.number, rollout.target - len(rollout.kept) - 1, others)

    def _close(self, flight: _Flight, rollout: _Rollout) -> None:
        if self._bound.is_late(flight.group, rollout.number):
            self._send_back(flight, rollout)
        else:
            self._count(flight.group, self._judge(flight.group), rollout)
        self._flights.remove(flight)  # last, so that an error loses nothing
        if rollout.awaited is not None:
            rollout.awaited.remove(flight)
        elif rollout.short <= 0:
            rollout.awaited = list(self._flights)

    def _count(self, group: Group, verdict: Kept, rollout: _Rollout) -> None:
        dropped = Dropped(group=group, reason=verdict.reason or "unnamed")
        if not verdict.keep and not verdict.keep_when_insufficient:
            self._drop(dropped, rollout)
            return
        if self._in_flight is InFlight.LEAVE:
            _to_json(group)  # a checkpoint may have to; here the hook is near that put in what cannot be kept
        if verdict.keep:
            rollout.kept.append(group)
        else:
            rollout.spare.append(dropped)

    def _drop(self, dropped: Dropped, rollout: _Rollout) -> None:
        rollout.dropped.append(dropped)
        self.ledger.dropped[dropped.reason] += 1

    def _send_back(self, flight: _Flight, rollout: _Rollout) -> None:
        """Its prompt is answered anew, unless it stands for a sample of which only children are left."""
        if any(sample.parent_index is not None for sample in flight.origin):
            self._drop(Dropped(group=flight.group, reason="stale"), rollout)
            return
        rollout.late.append(flight.group)
        self._source.add_samples([[sample.restarted() for sample in flight.origin]])
        self.ledger.returned += 1

    async def _settle(self, rollout_id: int) -> None:
        """Sees to the groups that the rollout does not need."""
        if self._in_flight is InFlight.LEAVE or not self._flights:
            return
        tasks = [flight.task for flight in self._flights]
        if self._in_flight is InFlight.FINISH:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self._landed()
        else:
            async with self._halt():
                await cancel_all(tasks)
        self._give_back(rollout_id)

    def _give_back(self, rollout_id: int) -> None:
        """Surplus groups go to the source, generated ones first: they are judged when their turn comes."""
        for flight in self._flights:
            if not flight.task.done():  # it will not end, and must not change what is gone on with
                flight.group = [sample.copy() for sample in flight.group]
            elif not flight.task.cancelled():
                flight.group = flight.task.result()
        generated = [flight.group for flight in self._flights if flight.is_generated]
        restarts = self._in_flight is InFlight.RESTART
        others = [flight.origin if restarts else flight.group for flight in self._flights if not flight.is_generated]
        groups = sorted(generated, key=group_order) + sorted(others, key=group_order)
        self._flights.clear()
        for sample in itertools.chain.from_iterable(groups):
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
        self._source.add_samples(groups)
        self.ledger.returned += len(groups)

    def _collected(self, rollout: _Rollout) -> Collected:
        filled = rollout.target - len(rollout.kept)
        groups = sorted(rollout.kept + [spare.group for spare in rollout.spare[:filled]], key=group_order)
        for spare in rollout.spare[filled:]:
            self._drop(spare, rollout)
        for sample in itertools.chain.from_iterable([*groups, *(each.group for each in rollout.dropped)]):
            sample.rollout_id = rollout.number
        self.ledger.trained += len(groups)
        assert self.ledger.in_flight == len(self._flights) + len(self._restored), "a group is lost or counted twice"
        metrics = self.ledger.metrics(self._reported)
        self._reported_before, self._reported = self._reported, self.ledger.copy()
        return Collected(groups=groups, dropped=rollout.dropped, late=rollout.late, metrics=metrics)

    def _too_few(self, rollout: _Rollout) -> str:
        reasons = Counter(each.reason for each in (*rollout.dropped, *rollout.spare))
        reasons.update({"stale": len(rollout.late)} if rollout.late else {})
        flag = "--max-groups-ahead" if self._continuous else "--over-sampling-batch-size"
        fell = ", ".join(f"{count} fell because {reason}" for reason, count in reasons.most_common())
        return (
            f"{rollout_name(rollout.number)}: {sum(reasons.values()) + len(rollout.kept)} groups were generated and "
            f"{len(rollout.kept)} of the {rollout.target} needed were kept; {fell} "
            f"(--max-refill-rounds {self._max_refills} x {flag} {self._batch_size})"
        )


def group_order(group: Group) -> int:
    """The key by which groups are ordered: the place at which their prompt was drawn."""
    index = group[0].group_index
    if index is None:
        raise ValueError("a group came back without its group_index; generate functions must keep it")
    return index


def _to_json(group: Group) -> list[dict[str, Any]]:
    return [sample_to_json(sample.copy()) for sample in group]
