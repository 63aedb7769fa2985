"""Weights over a process group of CPUs (gloo): they arrive as they were, or it is said whose fault it is."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vime.weights.broadcast import GRACE_S, Receiver, Sender, WrongBytes, bucket_bytes, moved, pack
from vime.weights.checksum import checksum
from vime.weights.collective import Collective, TransferTimeout, Transmission
from vime.weights.invitation import Invitation, SendReport
from vime.weights.lifeline import Lifeline, PeerLost
from vime.weights.plan import PlanMismatch, WeightPlan
from vime.weights.shm import view

TIMEOUT_S = 20.0
SHAPES = {"a": (40, 30), "b": (7,), "c": (300,), "d": (64, 64), "e": (1,)}
BUCKET = 6000  # bytes: a and b (5,120 with padding), c, then d alone although it is larger, then e

Weights = dict[str, Tensor]


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def plan(weights: Weights) -> WeightPlan:
    return WeightPlan.of((name, tensor.shape, "float32") for name, tensor in weights.items())


def load(receiver: Receiver, plan: WeightPlan) -> Weights:
    """What an engine does with a transmission."""
    found = {}
    for bucket, data in receiver.receive(plan, BUCKET):
        found.update({spec.name: view(data, moved(spec, bucket)).clone() for spec in bucket})
    return found


class Group:
    """A sender, and receivers that live in threads of this process."""

    def __init__(self, members: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.sender = Sender("127.0.0.1", members, timeout_s=timeout_s)
        self.threads = ThreadPoolExecutor(members + 1)
        joining = self.threads.submit(self.sender.join)
        self.receivers = list(self.threads.map(self._receiver, range(1, members + 1)))
        joining.result()

    def _receiver(self, rank: int) -> Receiver:
        return Receiver(self.sender.invitation, rank, f"rank {rank}")

    def transmit(
        self, plan: WeightPlan, weights: Weights, loads: dict[int, Callable[[Receiver, WeightPlan], Any]] | None = None
    ) -> tuple[SendReport, list[Any]]:
        """The sender's report, and what each receiver loaded, or what it raised."""
        futures = [
            self.threads.submit((loads or {}).get(rank, load), receiver, plan)
            for rank, receiver in enumerate(self.receivers, start=1)
        ]
        report = self.sender.send(plan, BUCKET, weights.items())
        return report, [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()
        self.threads.shutdown(wait=False)


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(members: int, **options: Any) -> Group:
        made.append(Group(members, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_broadcast_reaches_all_members_again_and_again(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    all_of_them = group(3)
    for step in range(3):
        new = {name: tensor + step for name, tensor in weights.items()}
        report, found = all_of_them.transmit(plan, new)
        assert report.failures == {}
        assert report.sent_bytes == plan.total_bytes
        for each in found:
            assert_equal(each, new)


def test_a_bucket_is_packed_while_the_one_before_is_under_way(group: Callable[..., Group]) -> None:
    """The receiver has the first bucket, listens for the second and takes its time. The sender has sent two, has the
    third under way and the fourth packed, and waits for memory with the fifth."""
    weights = {str(number): torch.full((1500,), float(number)) for number in range(8)}  # 6,000 bytes each
    plan = WeightPlan.of((name, tensor.shape, "float32") for name, tensor in weights.items())
    asked: list[str] = []
    seen: list[str] = []

    def slow(receiver: Receiver, plan: WeightPlan) -> None:
        buckets = receiver.receive(plan, BUCKET)
        next(buckets)
        deadline = time.monotonic() + 20
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # in which it would ask for more
        seen.extend(asked)
        for _ in buckets:
            pass

    def noting() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor

    alone = group(1)
    future = alone.threads.submit(slow, alone.receivers[0], plan)
    assert alone.sender.send(plan, BUCKET, noting()).failures == {}
    future.result()
    assert seen == ["0", "1", "2", "3"]
    assert asked == list(weights)


def test_a_transmission_that_moves_nothing_is_found(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library did once whose communicator was switched off: every call succeeded, and memory stayed as it was."""
    two = group(2)
    collective = two.receivers[1]._collective
    original = collective.broadcast

    def into_other_memory(data: Tensor, what: str) -> Any:
        transmission = original(torch.empty_like(data), what)
        transmission._data = data.fill_(0)
        return transmission

    monkeypatch.setattr(collective, "broadcast", into_other_memory)
    report, (good, bad) = two.transmit(plan, weights, {2: leaving})
    assert_equal(good, weights)
    assert isinstance(bad, WrongBytes)
    assert "a to b: what arrived is not what was sent" in str(bad)
    assert report.failures.keys() == {2}
    assert "rank 2 failed: WrongBytes: a to b" in report.failures[2]


def leaving(receiver: Receiver, plan: WeightPlan) -> Weights:
    """As an engine does: whoever fails leaves, and says why."""
    try:
        return load(receiver, plan)
    except BaseException as error:
        receiver.close(error)
        raise


def test_a_member_that_cannot_load_is_to_blame_and_the_others_are_told(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    def fails(receiver: Receiver, plan: WeightPlan) -> None:
        next(receiver.receive(plan, BUCKET))
        error = ValueError("no room")
        receiver.close(error)
        raise error

    three = group(3)
    begin = time.monotonic()
    report, found = three.transmit(plan, weights, {1: leaving, 2: fails, 3: leaving})
    assert time.monotonic() - begin < TIMEOUT_S / 2
    assert report.failures.keys() == {2}
    assert "rank 2 failed: ValueError: no room" in report.failures[2]
    assert [type(each) for each in found] == [PeerLost, ValueError, PeerLost]
    assert not three.receivers[0].is_open


def test_a_member_that_hangs_is_found_by_its_silence(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    released = threading.Event()

    def hangs(receiver: Receiver, plan: WeightPlan) -> None:
        next(receiver.receive(plan, BUCKET))
        released.wait(60)

    two = group(2, timeout_s=2.0)
    begin = time.monotonic()
    futures = [two.threads.submit(leaving, two.receivers[0], plan), two.threads.submit(hangs, two.receivers[1], plan)]
    report = two.sender.send(plan, BUCKET, weights.items())
    assert time.monotonic() - begin < 2 * (2.0 + GRACE_S)
    assert report.failures.keys() == {2}
    assert isinstance(futures[0].exception(), PeerLost)
    released.set()


def test_a_member_that_is_not_ready_ends_the_transmission_in_time(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    two = group(2, timeout_s=3.0)
    future = two.threads.submit(leaving, two.receivers[0], plan)
    report = two.sender.send(plan, BUCKET, weights.items())
    assert report.failures.keys() == {2}
    assert "rank 2 sent no answer within" in report.failures[2]
    assert isinstance(future.exception(), PeerLost)


def test_tensors_in_another_order_than_the_plans_are_refused(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    alone = group(1)
    future = alone.threads.submit(leaving, alone.receivers[0], plan)
    with pytest.raises(PlanMismatch, match=r"e \[1\] is to be sent where the plan has a \(float32 \[40, 30\]\)"):
        alone.sender.send(plan, BUCKET, reversed(weights.items()))
    assert "is to be sent where the plan has a" in str(future.exception())


def test_a_failure_of_the_trainer_is_raised_there_and_every_member_hears_of_it(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    """Errors of CUDA and of collective operations are RuntimeErrors like those of the group."""

    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights.items())[:3]
        raise RuntimeError("CUDA out of memory")

    two = group(2)
    futures = [two.threads.submit(leaving, receiver, plan) for receiver in two.receivers]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        two.sender.send(plan, BUCKET, gathered())
    for future in futures:  # what the group itself saw, if that came first, stands behind it
        assert str(future.exception()).startswith("the trainer failed: CUDA out of memory")
    assert time.monotonic() - begin < TIMEOUT_S / 2


def test_a_failure_after_the_last_bucket_leaves_nobody_waiting(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = group(1)

    def fails(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(alone.sender, "_state", fails)
    future = alone.threads.submit(leaving, alone.receivers[0], plan)
    with pytest.raises(MemoryError):
        alone.sender.send(plan, BUCKET, weights.items())
    assert str(future.exception(TIMEOUT_S / 2)).startswith("the trainer failed: MemoryError")


def test_a_member_that_fails_before_it_is_ready_is_heard_at_once(
    group: Callable[..., Group], weights: Weights, plan: WeightPlan
) -> None:
    """Also while another one, which is asked first, keeps the sender waiting."""
    two = group(2)
    begin = time.monotonic()
    two.receivers[1].close(PlanMismatch("another plan"))
    report = two.sender.send(plan, BUCKET, weights.items())
    assert "rank 2 failed: PlanMismatch: another plan" in report.failures[2]
    assert time.monotonic() - begin < GRACE_S + 2


def test_no_bucket_outlives_its_transmission(group: Callable[..., Group], weights: Weights, plan: WeightPlan) -> None:
    alone = group(1)
    buckets: list[StorageWeakRef] = []

    def noting(receiver: Receiver, plan: WeightPlan) -> None:
        for _, data in receiver.receive(plan, BUCKET):
            buckets.append(StorageWeakRef(data.untyped_storage()))
            del data

    alone.transmit(plan, weights, {1: noting})
    sent = alone.sender._collective
    assert sent is not None and all(each.is_over for each in sent._under_way)
    deadline = time.monotonic() + 5
    while not all(bucket.expired() for bucket in buckets) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's own thread lets go of the last one
    assert len(buckets) == 4
    assert [bucket.expired() for bucket in buckets] == [True] * 4


def test_an_operation_that_ended_because_somebody_left_is_no_success() -> None:
    def check() -> None:
        raise PeerLost("the trainer is gone")

    work = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    with pytest.raises(PeerLost):
        Transmission(work, torch.zeros(1), "a to b").wait(timeout_s=1, check=check)


def _leaves_and_ends() -> None:
    """With an operation under way."""
    pair = Group(1)
    collective = pair.receivers[0]._collective
    assert collective is not None
    collective.broadcast(torch.zeros(8, dtype=torch.uint8), "what nobody sends")
    pair.close()


def test_a_process_that_leaves_its_group_ends_in_peace() -> None:
    script = "from tests.weights.test_broadcast import _leaves_and_ends; _leaves_and_ends()"
    ended = subprocess.run([sys.executable, "-c", script], check=False, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_lifeline_works_beyond_the_descriptors_that_select_knows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    here, there = _tcp_pair()
    high = fcntl.fcntl(here.fileno(), fcntl.F_DUPFD, 1500)
    here.close()
    mine, theirs = Lifeline(socket.socket(fileno=high), "the other"), Lifeline(there, "me")
    try:
        theirs.send(heard=1)
        assert mine.receive(timeout_s=1) == {"heard": 1}
        mine.check()
    finally:
        mine.close()
        theirs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nobody_joins_without_the_secret() -> None:
    sender = Sender("127.0.0.1", 1, timeout_s=5.0)
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(sender.join)
        with pytest.raises(PeerLost, match="the trainer is gone"):
            Receiver(replace(sender.invitation, secret="another"), 1, "a stranger")
        stranger = socket.create_connection((sender.invitation.address, sender.invitation.port))
        stranger.sendall(b"GET / HTTP/1.1\n\n")
        receiver = Receiver(sender.invitation, 1, "rank 1")
        joining.result()
    receiver.close()
    sender.close()
    stranger.close()


@pytest.mark.parametrize(
    "said",
    [
        b"[1]",
        b"5",
        b"[" * 100_000,
        b'{"rank": null, "secret": "x"}',
        b'{"rank": 1, "secret": "\xc3\xa9"}',
        b'{"rank": 1, "secret": "\\ud800"}',
        b"\xff",
    ],
)
def test_nonsense_keeps_nobody_from_joining(said: bytes) -> None:
    sender = Sender("127.0.0.1", 1, timeout_s=5.0)
    address = sender.invitation.address, sender.invitation.port
    with ThreadPoolExecutor() as threads, socket.create_connection(address) as silent:
        joining = threads.submit(sender.join)
        with socket.create_connection(address) as stranger:
            stranger.sendall(said + b"\n")
            begin = time.monotonic()
            receiver = Receiver(sender.invitation, 1, "rank 1")
            joining.result()
            assert time.monotonic() - begin < 3
        assert silent.recv(1) == b"", "it is turned away in the end"
    receiver.close()
    sender.close()


def test_a_member_that_dies_before_the_group_is_made_is_named_at_once() -> None:
    """Gloo would wait for it until its own, much longer deadline."""
    sender = Sender("127.0.0.1", 2, timeout_s=TIMEOUT_S)
    invitation = sender.invitation
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(sender.join)
        doomed = Lifeline.to(invitation.address, invitation.port, "the trainer", timeout_s=5)
        doomed.send(rank=2, secret=invitation.secret, name="rank 2")
        other = threads.submit(Receiver, invitation, 1, "rank 1")
        doomed.receive(timeout_s=5)
        time.sleep(0.5)  # the others are making the group
        begin = time.monotonic()
        doomed.close()
        with pytest.raises(PeerLost, match="rank 2 is gone"):
            joining.result()
        assert "the trainer failed: rank 2 is gone" in str(other.exception())
        assert time.monotonic() - begin < 5


class Unconnected:
    """Makes members of groups as NCCL's: whoever begins the first operation waits in it until all others have come."""

    def __init__(self) -> None:
        self.all_came = threading.Event()
        self.aborts: list[Unconnected] = []

    def broadcast(self, *_: object) -> object:
        self.all_came.wait(300)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def abort(self) -> None:
        self.aborts.append(self)

    def member(self) -> type[Collective]:
        group = self

        class Member(Collective):
            def __init__(self, *_: object, **__: object) -> None:
                self._group, self._store, self._under_way = group, None, []

        return Member


@pytest.fixture
def unconnected() -> Iterator[Unconnected]:
    made = Unconnected()
    yield made
    made.all_came.set()


def test_a_member_that_dies_before_the_group_is_connected_is_named_at_once(
    unconnected: Unconnected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.weights.broadcast.Collective", unconnected.member())
    sender = Sender("127.0.0.1", 2, timeout_s=120.0)
    invitation = sender.invitation
    threads = ThreadPoolExecutor()
    joining = threads.submit(sender.join)
    doomed = Lifeline.to(invitation.address, invitation.port, "the trainer", timeout_s=5)
    doomed.send(rank=2, secret=invitation.secret, name="rank 2")
    other = threads.submit(Receiver, invitation, 1, "rank 1")
    doomed.receive(timeout_s=60)
    doomed.close()
    try:
        with pytest.raises(PeerLost, match="rank 2 is gone"):
            joining.result(60)
        assert "the trainer failed: rank 2 is gone" in str(other.exception(60))
        assert len(unconnected.aborts) == 2, "both have left"
    finally:
        unconnected.all_came.set()
        threads.shutdown()


def test_a_group_that_is_not_connected_in_time_is_given_up(unconnected: Unconnected) -> None:
    member = unconnected.member()(None, 0, 2, address="127.0.0.1", timeout_s=1.0)
    with pytest.raises(TransferTimeout, match=r"the greeting: not there after 0\.05 s"):
        member.first_broadcast(torch.zeros(1), "the greeting", timeout_s=0.05, check=lambda: None)
    member.abandon()
    unconnected.all_came.set()
    deadline = time.monotonic() + 60
    while len(unconnected.aborts) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(unconnected.aborts) == 2, "what was connected too late is ended too"


def test_a_known_secret_does_not_make_up_for_a_rank_that_is_none() -> None:
    sender = Sender("127.0.0.1", 1, timeout_s=0.5)
    with socket.create_connection((sender.invitation.address, sender.invitation.port)) as member:
        member.sendall(json.dumps({"rank": None, "secret": sender.invitation.secret}).encode() + b"\n")
        with pytest.raises(PeerLost, match="no sign of rank 1"):
            sender.join()


def test_a_member_that_never_comes_is_named() -> None:
    sender = Sender("127.0.0.1", 2, timeout_s=0.5)
    with pytest.raises(PeerLost, match="no sign of rank 1, 2 of the weight group"):
        sender.join()


def test_the_last_words_of_the_other_side_are_heard() -> None:
    here, there = _tcp_pair()
    mine, theirs = Lifeline(here, "the other"), Lifeline(there, "me")
    theirs.send(heard=1)
    theirs.fail("out of memory")
    theirs.close()
    with pytest.raises(PeerLost, match="the other failed: out of memory"):
        mine.check()
    assert mine.receive(timeout_s=1) == {"heard": 1}
    mine.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
    return client, connection


def _dies(invitation: Invitation, rank: int, entries: list[list[Any]], ready: Any) -> None:
    """A process that ends in the middle of a transmission, without a word."""
    plan = WeightPlan.from_json(entries)
    receiver = Receiver(invitation, rank, f"rank {rank}")
    ready.set()
    next(receiver.receive(plan, BUCKET))
    os._exit(9)


def test_a_member_that_is_killed_does_not_hold_the_others_up(weights: Weights, plan: WeightPlan) -> None:
    """And a group without it can be made at once."""
    sender = Sender("127.0.0.1", 2, timeout_s=120.0)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    doomed = context.Process(target=_dies, args=(sender.invitation, 2, plan.to_json(), ready), daemon=True)
    doomed.start()
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(sender.join)
        survivor = Receiver(sender.invitation, 1, "rank 1")
        joining.result()
        future = threads.submit(leaving, survivor, plan)
        begin = time.monotonic()
        report = sender.send(plan, BUCKET, weights.items())
        assert time.monotonic() - begin < 10
        assert report.failures.keys() == {2}
        assert "rank 2 is gone" in report.failures[2]
        assert isinstance(future.exception(), PeerLost)
    doomed.join(10)
    assert doomed.exitcode == 9
    again = Group(1)
    _, (found,) = again.transmit(plan, weights)
    assert_equal(found, weights)
    again.close()


def test_the_checksum_knows_values_and_places() -> None:
    data = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    swapped_rows = torch.cat([data[256:512], data[:256], data[512:]])
    swapped_words = torch.cat([data[8:16], data[:8], data[16:]])
    one_bit = data.clone()
    one_bit[1000] ^= 1
    sums = {int(checksum(each)) for each in (data, swapped_rows, swapped_words, one_bit, torch.zeros_like(data))}
    assert len(sums) == 5
    assert int(checksum(data.clone())) == int(checksum(data))


def test_buckets_keep_the_places_of_their_tensors(weights: Weights, plan: WeightPlan) -> None:
    ranges = list(plan.buckets(BUCKET))
    assert ranges == [(0, 2), (2, 3), (3, 4), (4, 5)]
    bucket = plan.tensors[1:3]
    assert bucket_bytes(bucket) == 256 + 1280
    data = torch.zeros(bucket_bytes(bucket), dtype=torch.uint8)
    pack(bucket, iter([("b", weights["b"]), ("c", weights["c"])]), data)
    assert torch.equal(view(data, moved(bucket[1], bucket)), weights["c"])
