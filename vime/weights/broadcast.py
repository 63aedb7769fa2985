"""Weights over a process group: the trainer's end, and the end in each process of an engine.

The sender packs one bucket while the one before is under way, and states a checksum of each bucket, which it computed
from its own copy; a receiver compares. Besides its own weights a sender holds two buckets. A receiver holds three, and
those of which whoever loads them still holds a view; between two transmissions neither holds any.

No step waits for ever, and none waits for somebody who is gone: every member has a lifeline to the sender. When a
member ends, fails or is silent for too long, the sender tells the others, all leave the group, and its report says who
is to blame; a new group without that member can be made at once.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from vime.weights.checksum import checksum
from vime.weights.collective import Collective, TransferFailed, Transmission, empty_bytes, join_store, open_store
from vime.weights.invitation import Invitation, SendReport
from vime.weights.lifeline import Lifeline, PeerLost, wait_for_any
from vime.weights.plan import PlanMismatch, TensorSpec, WeightPlan
from vime.weights.shm import view

__all__ = ["Receiver", "Sender", "WrongBytes"]

GRACE_S = 5.0
"""How long those who are told that a transmission has ended may take to answer; who does not is taken for dead."""

PATIENCE = 2
"""How many times longer than the sender a receiver waits: the sender knows who is late, and says so in the end."""

ACCEPT_S = 0.1
GREETING_BYTES = 1024


class WrongBytes(RuntimeError):
    """What arrived is not what was sent. The message names the tensors."""


class Sender:
    """The trainer's end of a group: ``join`` once, then ``send`` for every sync until one fails.

    Args:
        address: of this machine, where the members can reach it. Nothing listens anywhere else.
        members: how many processes will join.
        timeout_s: deadline of each step: until all have joined, until all are ready, and of each bucket.
    """

    def __init__(self, address: str, members: int, *, timeout_s: float) -> None:
        self._listener: socket.socket | None = socket.create_server((address, 0), backlog=max(members, 16))
        self.invitation = Invitation(
            address=address,
            port=self._listener.getsockname()[1],
            secret=secrets.token_hex(16),
            world_size=1 + members,
            timeout_s=timeout_s,
        )
        self._lifelines: dict[int, Lifeline] = {}
        self._collective: Collective | None = None

    def join(self) -> None:
        """Waits for the members, and sees that a broadcast reaches them.

        Raises:
            PeerLost: one did not come in time, or failed.
            TransferTimeout: the group was not connected in time, or carried nothing.
            WrongBytes: the group carries other bytes than those that were sent.
        """
        invitation = self.invitation
        try:
            self._accept_all(time.monotonic() + invitation.timeout_s)
            store, port = open_store(invitation.address, timeout_s=invitation.timeout_s)
            for lifeline in self._lifelines.values():
                lifeline.send(store_port=port)
            self._collective = Collective.meet(
                store,
                0,
                invitation.world_size,
                address=invitation.address,
                timeout_s=2 * PATIENCE * invitation.timeout_s,
                check=self._check,
            )
            self._greet(self._collective)
        except BaseException as error:
            self.close(described(error))
            raise

    def _accept_all(self, deadline: float) -> None:
        """Nobody who says nothing, or nonsense, keeps the others waiting."""
        listener = self._listener
        assert listener is not None, "the group has its members"
        listener.settimeout(0.0)
        strangers: list[Lifeline] = []
        try:
            while len(self._lifelines) < self.invitation.world_size - 1:
                wait_for_any([listener, *strangers], min(ACCEPT_S, deadline - time.monotonic()))
                with suppress(BlockingIOError, ConnectionError):
                    strangers.append(Lifeline(listener.accept()[0], "somebody"))
                strangers = [lifeline for lifeline in strangers if not self._has_spoken(lifeline)]
                self._check()
                if time.monotonic() >= deadline:
                    self._complain_of_missing()
        finally:
            for lifeline in strangers:
                lifeline.close()
        listener.close()
        self._listener = None

    def _complain_of_missing(self) -> None:
        if missing := self._missing():
            raise PeerLost(f"no sign of rank {', '.join(map(str, missing))} of the weight group")

    def _has_spoken(self, lifeline: Lifeline) -> bool:
        """Admits who says the secret, and turns away who says anything else."""
        try:
            if (hello := lifeline.received()) is None:
                return False
            known = hmac.compare_digest(str(hello.get("secret")).encode(), self.invitation.secret.encode())
        except (PeerLost, ValueError):
            lifeline.close()
            return True
        rank = hello.get("rank")
        if not known or not isinstance(rank, int) or rank not in self._missing():
            lifeline.close()
            return True
        lifeline.name = str(hello.get("name", f"rank {rank}"))
        self._lifelines[rank] = lifeline
        return True

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.invitation.world_size) if rank not in self._lifelines]

    def _greet(self, collective: Collective) -> None:
        """Makes the connections before anything waits for them, and finds a group that carries nothing."""
        greeting = torch.randint(256, (GREETING_BYTES,), dtype=torch.uint8).to(empty_bytes(0).device)
        timeout_s = self.invitation.timeout_s
        greeted = collective.first_broadcast(greeting, "the greeting", timeout_s=timeout_s, check=self._check)
        greeted.wait(timeout_s=timeout_s, check=self._check)
        said = int(checksum(greeting))
        for rank, answer in self._hear_all().items():
            if answer.get("heard") != said:
                name = self._lifelines[rank].name
                raise WrongBytes(f"the weight group does not carry what is sent: {name} got something else")

    def send(self, plan: WeightPlan, max_bytes: int, tensors: Iterable[tuple[str, Tensor]]) -> SendReport:
        """Sends the tensors, which come in the plan's order, in buckets of at most ``max_bytes`` (or one tensor).

        When members fail, the report says so; this may leave ``tensors`` unread. Whatever fails here, such as the
        reading of ``tensors``, is raised as it is; every member hears of it, and fails too.

        Raises:
            PlanMismatch: a tensor is not the one that the plan has there.
        """
        begin = time.monotonic()
        try:
            return self._send(plan, max_bytes, tensors, begin)
        except (PeerLost, TransferFailed) as error:
            return self._give_up(str(error), time.monotonic() - begin)
        except BaseException as error:
            self.close(described(error))
            raise

    def _send(
        self, plan: WeightPlan, max_bytes: int, tensors: Iterable[tuple[str, Tensor]], begin: float
    ) -> SendReport:
        sums = self._send_buckets(plan, max_bytes, tensors)
        failures = self._state(sums)
        seconds = time.monotonic() - begin
        if failures:
            self.close("another member failed")
        return SendReport(sent_bytes=plan.total_bytes, seconds=seconds, failures=failures)

    def _send_buckets(
        self, plan: WeightPlan, max_bytes: int, tensors: Iterable[tuple[str, Tensor]]
    ) -> list[tuple[int, Tensor]]:
        """Number and checksum of each bucket."""
        collective = self._collective
        assert collective is not None, "nobody joined the group"
        following = iter(tensors)
        buckets = [plan.tensors[first:last] for first, last in plan.buckets(max_bytes)]
        largest = max((bucket_bytes(bucket) for bucket in buckets), default=0)
        memory = [empty_bytes(largest) for _ in buckets[:2]]
        under_way: deque[Transmission] = deque()
        sums = []
        for number, bucket in enumerate(buckets):
            if len(under_way) == len(memory):
                self._wait(under_way.popleft())
            data = memory[number % 2][: bucket_bytes(bucket)]
            pack(bucket, following, data)
            sums.append((number, checksum(data)))
            if number == 0:
                self._await_ready()
            under_way.append(collective.broadcast(data, describe(bucket)))
        while under_way:
            self._wait(under_way.popleft())
        return sums

    def _await_ready(self) -> None:
        """A broadcast to somebody who does not listen yet could not be given up; so all say that they listen."""
        for rank, answer in self._hear_all().items():
            if not answer.get("ready"):
                raise PeerLost(f"{self._lifelines[rank].name} said something else than that it is ready")

    def _hear_all(self) -> dict[int, dict[str, Any]]:
        """One message of every member, by rank. Raises PeerLost as soon as one fails, or when the time is up."""
        timeout_s = self.invitation.timeout_s
        deadline = time.monotonic() + timeout_s
        heard: dict[int, dict[str, Any]] = {}
        while True:
            self._check()  # before: what it reads is taken here, and what comes later ends the waiting
            for rank, lifeline in self._lifelines.items():
                if rank not in heard and (message := lifeline.received()) is not None:
                    heard[rank] = message
            silent = [lifeline.name for rank, lifeline in self._lifelines.items() if rank not in heard]
            if not silent:
                return heard
            if time.monotonic() >= deadline:
                raise PeerLost(f"{', '.join(silent)} sent no answer within {timeout_s:g} s")
            wait_for_any(self._lifelines.values(), deadline - time.monotonic())

    def _wait(self, transmission: Transmission) -> None:
        transmission.wait(timeout_s=self.invitation.timeout_s, check=self._check)

    def _check(self) -> None:
        for lifeline in self._lifelines.values():
            lifeline.check()

    def _state(self, sums: list[tuple[int, Tensor]]) -> dict[int, str]:
        """Says the checksums; returns who has other ones, or has failed."""
        stated = torch.stack([value for _, value in sums]).tolist() if sums else []
        failures = {}
        for rank, lifeline in self._lifelines.items():
            try:
                lifeline.send(checksums=stated)
            except PeerLost as lost:
                failures[rank] = str(lost)
        begin = time.monotonic()
        for rank, lifeline in self._lifelines.items():
            try:
                lifeline.receive(timeout_s=self.invitation.timeout_s, since=begin)
            except PeerLost as lost:
                failures.setdefault(rank, str(lost))
        return failures

    def _give_up(self, reason: str, seconds: float) -> SendReport:
        """Tells everybody, finds out who is to blame, and leaves the group."""
        failures = {}
        for lifeline in self._lifelines.values():
            lifeline.fail(reason)
        begin = time.monotonic()
        for rank, lifeline in self._lifelines.items():
            try:
                while True:
                    lifeline.receive(timeout_s=GRACE_S, since=begin)
            except PeerLost as lost:
                if not lost.interrupted:
                    failures[rank] = str(lost)
        self.close(reason)
        return SendReport(sent_bytes=0, seconds=seconds, failures=failures, interrupted=reason)

    def close(self, reason: str = "the group was closed") -> None:
        """Leaves the group; never waits. Members that still listen hear the reason."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for lifeline in self._lifelines.values():
            lifeline.fail(reason, interrupted=True)
            lifeline.close()
        self._lifelines.clear()
        if self._collective is not None:
            self._collective.abandon()
            self._collective = None


class Receiver:
    """The end of one process of an engine. Joining is the constructor; then ``receive`` once for every sync.

    Args:
        rank: in the group, from 1 on.
        name: how the sender calls this process in messages.

    Raises:
        PeerLost: the sender is not there, turned this process away, or others did not come.
        WrongBytes: the group does not carry what is sent.
    """

    def __init__(self, invitation: Invitation, rank: int, name: str) -> None:
        self.invitation = invitation
        self._rank = rank
        timeout_s = invitation.timeout_s
        self._lifeline = Lifeline.to(invitation.address, invitation.port, "the trainer", timeout_s=timeout_s)
        self._collective: Collective | None = None
        self._interrupted = False
        try:
            self._join(name)
        except BaseException as error:
            self.close(error)
            raise

    def _join(self, name: str) -> None:
        invitation, lifeline = self.invitation, self._lifeline
        lifeline.send(rank=self._rank, secret=invitation.secret, name=name)
        with self._others_fault():  # the others may be late
            port = int(lifeline.receive(timeout_s=PATIENCE * invitation.timeout_s)["store_port"])
        store = join_store(invitation.address, port, timeout_s=invitation.timeout_s)
        with self._others_fault():
            self._collective = Collective.meet(
                store,
                self._rank,
                invitation.world_size,
                address=lifeline.own_address,
                timeout_s=2 * PATIENCE * invitation.timeout_s,
                check=lifeline.check,
            )
            greeted = self._collective.first_broadcast(
                empty_bytes(GREETING_BYTES),
                "the greeting",
                timeout_s=PATIENCE * invitation.timeout_s,
                check=lifeline.check,
            )
        heard = self._arrived(greeted)
        lifeline.send(heard=int(checksum(heard)))

    def receive(self, plan: WeightPlan, max_bytes: int) -> Iterator[tuple[tuple[TensorSpec, ...], Tensor]]:
        """Yields each bucket's tensors and its bytes, in which the first tensor begins at 0.

        The bytes are the caller's: nothing writes to them again. Whoever stops reading must ``close``.

        Raises:
            PeerLost: the sender is gone or gave the transmission up, or a bucket did not come.
            WrongBytes: a bucket is not what the sender stated.
        """
        assert self._collective is not None, "this process has left the group"
        buckets = [plan.tensors[first:last] for first, last in plan.buckets(max_bytes)]
        waiting = deque(buckets)
        under_way: deque[Transmission] = deque()
        sums = []
        self._lifeline.send(ready=True)
        for bucket in buckets:
            while waiting and len(under_way) < 2:
                following = waiting.popleft()
                memory = empty_bytes(bucket_bytes(following))
                with self._others_fault():
                    under_way.append(self._collective.broadcast(memory, describe(following)))
                del memory
            data = self._arrived(under_way.popleft())
            sums.append(checksum(data))
            yield bucket, data
            del data
        self._compare(buckets, torch.stack(sums).tolist() if sums else [])
        self._lifeline.send(received=True)

    def _arrived(self, transmission: Transmission) -> Tensor:
        with self._others_fault():
            return transmission.wait(timeout_s=PATIENCE * self.invitation.timeout_s, check=self._lifeline.check)

    @contextmanager
    def _others_fault(self) -> Iterator[None]:
        """What goes wrong with the group is not this process's own failure; the sender knows whose it is."""
        try:
            yield
        except PeerLost:
            self._interrupted = True
            raise
        except TransferFailed as error:
            self._interrupted = True
            raise PeerLost(f"{self._last_words()}; what was seen here: {str(error).splitlines()[0]}") from None

    def _last_words(self) -> str:
        try:
            while True:
                self._lifeline.receive(timeout_s=GRACE_S / 2)
        except PeerLost as lost:
            return str(lost)

    def _compare(self, buckets: list[tuple[TensorSpec, ...]], sums: list[int]) -> None:
        with self._others_fault():
            stated = self._lifeline.receive(timeout_s=PATIENCE * self.invitation.timeout_s).get("checksums")
        assert isinstance(stated, list) and len(stated) == len(sums), "both sides cut the same plan"
        for bucket, mine, theirs in zip(buckets, sums, stated, strict=True):
            if mine != theirs:
                raise WrongBytes(f"{describe(bucket)}: what arrived is not what was sent (checksum {mine}, {theirs})")

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the group; never waits. With an error, the sender is told why, and whether it was for others' sake."""
        if error is not None:
            self._lifeline.fail(f"{type(error).__name__}: {error}", interrupted=self._interrupted)
        self._lifeline.close()
        if self._collective is not None:
            self._collective.abandon()
            self._collective = None

    @property
    def is_open(self) -> bool:
        return self._collective is not None


def described(error: BaseException) -> str:
    return str(error) or type(error).__name__


def bucket_bytes(bucket: tuple[TensorSpec, ...]) -> int:
    """From the first tensor to the padded end of the last one."""
    return bucket[-1].end - bucket[0].offset


def describe(bucket: tuple[TensorSpec, ...]) -> str:
    return f"{bucket[0].name} to {bucket[-1].name}"


def moved(spec: TensorSpec, bucket: tuple[TensorSpec, ...]) -> TensorSpec:
    """The tensor's place in the bytes of its bucket."""
    return dataclasses.replace(spec, offset=spec.offset - bucket[0].offset)


def pack(bucket: tuple[TensorSpec, ...], tensors: Iterator[tuple[str, Tensor]], data: Tensor) -> None:
    """Copies the next tensors into the bucket's bytes, converted to the plan's dtypes."""
    with torch.no_grad():
        for spec in bucket:
            name, tensor = next(tensors, ("nothing", None))
            if tensor is None or name != spec.name or tuple(tensor.shape) != spec.shape:
                shape = "" if tensor is None else f" {list(tensor.shape)}"
                raise PlanMismatch(f"{name}{shape} is to be sent where the plan has {spec}")
            view(data, moved(spec, bucket)).copy_(tensor, non_blocking=True)
