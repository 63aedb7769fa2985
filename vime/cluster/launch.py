"""From a Config to a finished run: loads the data, starts the processes, runs the loop, ends the processes.

Whatever can be wrong with flags and files is found before the first process starts. Whatever ends the run, its
processes are stopped in order, and the cause is the last thing printed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from vime import async_loop, loop
from vime.cluster.calls import RemoteError
from vime.cluster.job import Job
from vime.cluster.memory import PeakMemory
from vime.cluster.record import Record, open_record, resume_command, what_is_kept, with_new_run_dir
from vime.cluster.saved_job import SavedJob
from vime.cluster.session import Slots, check_devices, check_room, object_store_bytes, ray_session
from vime.cluster.sft_job import SftJob
from vime.cluster.supervision import supervised
from vime.cluster.training_job import TrainingJob
from vime.config import Config
from vime.errors import UserError
from vime.plugins.calling import raised
from vime.rollout.build import Prompts, load_prompts, load_saved
from vime.rollout.saved import SavedRollouts
from vime.rollout.sft import Dialogues, load_dialogues
from vime.rollout.tasks import event_loop
from vime.serving.http import EngineError
from vime.weights.sync import SyncError

INTERRUPTED = 130  # the exit status of a process that Ctrl-C ended


def main(config: Config) -> int:
    """Runs the job and returns the exit status."""
    try:
        with event_loop() as loop_runner, one_interrupt_is_enough():
            loop_runner.run(run(config))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("interrupted: every process was stopped", *what_is_kept(config), sep="\n", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as ended:  # of a task that a user's function started: it would end the run without a word
        print(f"error: a task of a custom function {raised(ended)}, which ended the run", file=sys.stderr)
        return 1
    except (UserError, RemoteError, EngineError, SyncError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def run(config: Config) -> None:
    """The whole job."""
    data = load_data(config)
    config = with_new_run_dir(with_rollouts(config, data.num_rollout(config)))
    async with AsyncExitStack() as stack:
        memory = await stack.enter_async_context(PeakMemory())
        record = stack.enter_context(open_record(config, total=data.num_rollout(config)))
        with record.report.phase("start"):
            slots = stack.enter_context(ray_session(config.cluster.num_slots, object_store_bytes(config)))
            check_devices(config, slots)
            check_room(config, slots, record.report.say)
            stack.enter_context(sigterm_cancels())
            job = make_job(config, data, record, slots)
            stack.push_async_callback(job.stop)
            stack.enter_context(tells_that_it_stops(record.report.say))
            await job.start()
        train = async_loop.train if config.asynchrony.asynchronous else loop.train
        await supervised(
            train(job.schedule, job.rollouts, job.learner, job.weights, job.checkpoints, record.report),
            job.watch(),
            job.failures,
        )
        record.report.finish(peak_memory_bytes=memory.peak_bytes, resume_command=resume_command(config))


Data = Prompts | Dialogues | SavedRollouts


def load_data(config: Config) -> Data:
    """What is read from files before a process starts.

    Raises:
        UserError: a file cannot be used.
    """
    if config.algorithm.is_sft:
        return load_dialogues(config)
    return load_saved(config) if config.ops.load_debug_rollout_data is not None else load_prompts(config)


def make_job(config: Config, data: Data, record: Record, slots: Slots) -> TrainingJob:
    """The job that is made of such data."""
    if isinstance(data, Dialogues):
        return SftJob(config, data, record, slots)
    if isinstance(data, SavedRollouts):
        return SavedJob(config, data, record, slots)
    return Job(config, data, record, slots)


def with_rollouts(config: Config, count: int) -> Config:
    """The configuration with the number of rollouts that ``--num-epoch`` comes to: learning rates decay over it."""
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, num_rollout=count))


@contextmanager
def one_interrupt_is_enough() -> Iterator[None]:
    """Whatever interrupts the block, Ctrl-C has no further effect in this process, which now comes to its end: in the
    midst of that, and of what Ray does at exit, it would give a traceback and leave processes behind."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


@contextmanager
def tells_that_it_stops(say: Callable[[str], None]) -> Iterator[None]:
    """An orderly end takes seconds: a person who interrupted the block hears at once that it has begun."""
    try:
        yield
    except asyncio.CancelledError:
        say("interrupted: stopping every process")
        raise


@contextmanager
def sigterm_cancels() -> Iterator[None]:
    """SIGTERM ends the current task in order, as Ctrl-C does. To be entered after Ray, which sets its own handler."""
    task = asyncio.current_task()
    assert task is not None
    running = asyncio.get_running_loop()
    running.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        running.remove_signal_handler(signal.SIGTERM)
