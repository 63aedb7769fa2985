"""A pool of killable grader processes: the ``ports.GraderPool`` of real runs.

Invariants:
* a grading never takes longer than its deadline: its process is killed, the Grade is an error, and a new process takes
  the place while the others go on;
* every call of ``grade`` returns a Grade, whatever graders do; only cancellation passes through;
* an answer whose process is killed by somebody else is graded once more, by another one;
* after ``close`` no process is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vime.rewards.process import EndedIdle, GraderProcess, Killed, NotSent, ProcessEnded
from vime.rewards.wire import DEADLINE_VARIABLE, grade_from_json
from vime.types import Grade

COUNTED = ("scored", "invalid", "error", "deadline_exceeded", "died")


class GraderProcessPool:
    """Grades answers in child processes, one answer a process at a time.

    Args:
        workers: processes.
        deadline_s: of one grading, from when a process begins with it.
        memory_limit_bytes: address space of each process; 0 for no limit.
        start_deadline_s: of starting a process, and of importing a grader.
        preload: graders that each process imports and tries before it takes work.
        worker_module: what runs in the processes.
        environment: further variables of the processes, for graders that have settings.
    """

    def __init__(
        self,
        workers: int = 2,
        deadline_s: float = 10.0,
        *,
        memory_limit_bytes: int = 1 << 30,
        start_deadline_s: float = 60.0,
        preload: Sequence[str] = (),
        worker_module: str = "vime.rewards.worker",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if workers < 1 or deadline_s <= 0:
            raise ValueError(f"a grader pool needs workers and a deadline, not {workers} and {deadline_s} s")
        self._workers = workers
        self._deadline_s = deadline_s
        self._memory_limit_bytes = memory_limit_bytes
        self._start_deadline_s = start_deadline_s
        self._preload = tuple(preload)
        self._worker_module = worker_module
        self._environment = {DEADLINE_VARIABLE: str(deadline_s), **(environment or {})}
        self._idle: asyncio.Queue[GraderProcess | ProcessEnded | None] = asyncio.Queue()  # None: the pool is closed
        self._processes: set[GraderProcess] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._started = self._closed = False

    async def start(self) -> None:
        """Starts all processes and waits for them; without it the first grading starts them.

        Raises:
            ProcessEnded: a process could not start.
        """
        self._begin()
        await asyncio.gather(*self._starts)
        for _ in range(self._idle.qsize()):
            entry = self._idle.get_nowait()
            self._idle.put_nowait(entry)
            if isinstance(entry, ProcessEnded):
                raise entry

    async def grade(self, rm_type: str, response: str, label: str | None, metadata: Mapping[str, Any]) -> Grade:
        """Grades in the next idle process. Never raises for what a grader does."""
        request = {"rm_type": rm_type, "response": response, "label": label, "metadata": dict(metadata)}
        grade = await self._grade(request)
        self._counts[grade.status.value] += 1
        return grade

    def counts(self) -> dict[str, int]:
        """How many gradings ended how, since the start: by status, and the errors by deadlines and dead processes."""
        return {name: self._counts[name] for name in COUNTED}

    async def close(self) -> None:
        """Ends all processes; gradings that still run or wait end as errors."""
        self._closed = True
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()
        self._idle.put_nowait(None)

    async def _grade(self, request: dict[str, Any], tries: int = 2) -> Grade:
        self._begin()
        entry = await self._next_idle()
        if not isinstance(entry, GraderProcess):
            return Grade.error(str(entry) if entry else "the grader pool is closed")
        try:
            record = await entry.grade(request, deadline_s=self._deadline_s, load_deadline_s=self._start_deadline_s)
            grade = grade_from_json(record)
        except NotSent as error:
            grade = Grade.error(str(error))
        except TimeoutError:
            self._replace(entry)
            self._counts["deadline_exceeded"] += 1
            return Grade.error(f"deadline of {self._deadline_s:g} s exceeded")
        except ProcessEnded as ended:
            self._replace(entry)
            if isinstance(ended, EndedIdle | Killed) and tries > 1:
                return await self._grade(request, tries - 1)
            self._counts["died"] += 1
            return Grade.error(str(ended))
        except BaseException:  # cancelled: what the process is doing nobody waits for
            self._replace(entry)
            raise
        self._idle.put_nowait(entry)
        return grade

    async def _next_idle(self) -> GraderProcess | ProcessEnded | None:
        while True:
            entry = await self._idle.get()
            if entry is None:
                self._idle.put_nowait(None)  # for whoever else waits
            elif isinstance(entry, ProcessEnded):
                self._launch()  # tried again for the next request; this one learns why
            elif not entry.alive:
                self._replace(entry)
                continue
            return entry

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            for _ in range(self._workers):
                self._launch()

    def _launch(self, killed: GraderProcess | None = None) -> None:
        if self._closed:
            return
        task = asyncio.create_task(self._start_process(killed))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    def _replace(self, process: GraderProcess) -> None:
        self._launch(killed=process)

    async def _start_process(self, killed: GraderProcess | None) -> None:
        if killed is not None:
            await killed.kill()
            self._processes.discard(killed)
        try:
            process = await GraderProcess.start(
                self._worker_module,
                memory_limit_bytes=self._memory_limit_bytes,
                preload=self._preload,
                deadline_s=self._start_deadline_s,
                environment=self._environment,
            )
        except (ProcessEnded, OSError) as error:
            self._idle.put_nowait(ProcessEnded(f"no grader process could be started: {error}"))
            return
        self._processes.add(process)
        self._idle.put_nowait(process)
