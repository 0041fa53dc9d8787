"""An asyncio event loop on virtual time, and the processes that share it.

The rule: one integer decides everything. Time jumps to the next timer; within a process callbacks run in the order in
which they were made (asyncio promises that), between processes a seeded choice decides. A process is a name in a
context variable: what its code starts belongs to it, stops with it and dies with it. Blocking work has a stack of its own
and is let go on only when the loop says so, at each operation of the disk, so that it interleaves with everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("simulated_process")
START_S = 10_000.0
LOCK_LOOK_S = 0.001
STOPPED_LOOK_S = 0.05
MOST_AT_ONCE = 20_000  # callbacks at one instant: runs that are right have some hundred
EARLY_S = 1e-9  # asyncio calls a timer up to its clock's resolution before its time: here every other one


class Killed(BaseException):
    """Raised in a thread of a process that is dead: nothing of it may have an effect any more."""


class Process:
    """One process of the world. `offset_s`: its host's monotonic clock against virtual time."""

    def __init__(self, loop: SimLoop, name: str, host: str, offset_s: float = 0.0) -> None:
        self.loop, self.name, self.host, self.offset_s = loop, name, host, offset_s
        self.number = loop.next_process()
        self.alive = True
        self.paused = False
        self.born_at = self.woke_at = loop.now
        self._away_s = 0.0
        self._stopped_at = 0.0
        self.ready: deque[SimHandle] = deque()
        self.jobs: list[Job] = []
        self.on_kill: list[Callable[[], None]] = []
        self.crash_in_disk_ops = -1  # dies at the n-th change of the disk from now
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call something as this process."""
        return self._context.copy().run(work, *args)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """A task of this process."""
        task: asyncio.Task[Any] = self.loop.create_task(work, name=name or self.name, context=self._context.copy())
        self.loop.kept.append(task)
        return task

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """A callback of this process, as an event from outside."""
        if self.alive:
            self.loop.call_soon(work, *args, context=self._context.copy())

    def deliver(self, work: Callable[..., Any], *args: Any) -> None:
        """Bytes for a socket of this process: they are in its buffers at once, or when it goes on. Called by a timer."""
        if self.paused:
            self.soon(work, *args)
        elif self.alive:
            self._context.run(work, *args)

    def kill(self) -> None:
        """As SIGKILL."""
        if not self.alive:
            return
        self.alive = False
        self.ready.clear()
        self.loop.moved = True
        for job in list(self.jobs):
            job.kill()
        for call in self.on_kill:
            call()

    def pause(self) -> None:
        """As SIGSTOP."""
        if not self.paused:
            self.paused, self._stopped_at = True, self.loop.now
            self.loop.moved = True

    @property
    def away_s(self) -> float:
        """How long it was stopped until now, all in all."""
        return self._away_s + (self.loop.now - self._stopped_at if self.paused else 0.0)

    def go_on(self) -> None:
        """As SIGCONT. What came meanwhile waits in sockets and timers; either may be looked at first."""
        if self.paused:
            self._away_s, self.woke_at = self.away_s, self.loop.now
            self.paused, self.loop.moved = False, True
            if self.loop.random.random() < 0.5:
                timers = [h for h in self.ready if h.timer]
                others = [h for h in self.ready if not h.timer]
                self.ready = deque([*others, *timers])


class Job:
    """Blocking work of a process: a greenlet in place of a thread, so that it runs only while the loop waits for it."""

    def __init__(self, loop: SimLoop, process: Process, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.loop, self.process, self.future = loop, process, future
        self._work = work
        self.begun = self.over = self.killed = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._stack = greenlet(self.work)
        self._caller: greenlet | None = None
        self.then: Callable[[], None] = lambda: None
        process.jobs.append(self)

    def step(self) -> None:
        """Let the work run up to its next stop. Called on the loop."""
        if self.over:
            return
        before, self.loop.job = self.loop.job, self
        self.begun = True
        self._caller = self._stack.parent = getcurrent()  # also where it goes on when the work is over
        self._stack.switch()
        self.loop.job = before
        if self.over:
            self.process.jobs.remove(self)
            if self.process.alive and not self.killed:
                self._settle()
                self.then()

    def stop_for(self, delay_s: float) -> None:
        """Called in the work: let virtual time pass. Raises Killed when the process died meanwhile."""
        assert self._caller is not None
        self.loop.at(self.loop.now + delay_s, self.process, self._go_on)
        self._caller.switch()
        if self.killed or not self.process.alive:
            raise Killed

    def _go_on(self) -> None:
        if self.process.paused and self.process.alive:
            self.loop.at(self.loop.now + STOPPED_LOOK_S, self.process, self._go_on)
        else:
            self.step()

    def kill(self) -> None:
        """The process is dead: the work unwinds without effect."""
        self.killed = True
        if not self.begun:
            self.over = True
        elif not self.over and self.loop.job is not self:
            self.step()

    def work(self) -> None:
        """Called in the greenlet."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self.over = True

    def _settle(self) -> None:
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._result)
        elif isinstance(self._error, StopIteration):
            self.future.set_exception(RuntimeError("StopIteration in a thread"))
        else:
            self.future.set_exception(self._error)


class SimLock:
    """threading.Lock between simulated threads: whoever waits lets virtual time pass."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            assert self._loop.job is not None, "a loop that waits for a lock stands still"
            self._loop.job.stop_for(LOCK_LOOK_S)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class SimHandle:
    """A callback that waits for its turn: of asyncio's handles what is asked for here."""

    __slots__ = ("_cancelled", "args", "callback", "context", "timer")

    def __init__(self, callback: Any, args: Any, context: contextvars.Context, timer: bool) -> None:
        self.callback, self.args, self.context, self.timer = callback, args, context, timer
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self._cancelled


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set is the same in each run: code that cancels all of a set does so in one order."""

    __slots__ = ("serial",)
    serial: int

    def __hash__(self) -> int:
        return self.serial


class SimFuture(asyncio.Future[Any]):
    """As SimTask."""

    __slots__ = ("serial",)
    serial: int

    def __hash__(self) -> int:
        return self.serial


class SimLoop(asyncio.BaseEventLoop):
    """See the module. `steps` counts callbacks; `fingerprint` is over all of them, in order."""

    forgotten = 0  # loops of this process
    collect_every = 5  # of them: it takes as long as a tenth of a run. 0: never, in a process that ends soon

    def __init__(self, random: Random, thread_random: Random) -> None:
        super().__init__()
        self.random = random
        self.now = START_S
        self.steps = 0
        self.fingerprint = 0
        self.job: Job | None = None
        self.moved = True  # whether another process may have become able to run, or unable
        self.kept: list[Any] = []  # nothing of a dead process may be collected: its `finally` would run
        self.failures: list[str] = []  # exceptions that nobody caught: each is a bug
        self._tasks: list[weakref.ref[SimTask]] = []
        self._thread_random = thread_random
        self._timers: list[tuple[float, int, Process, SimHandle | Callable[[], None]]] = []
        self._serial = self._made = self._processes = 0
        self._with_work: dict[Process, None] = {}
        self._executors: dict[int, deque[Job]] = {}
        self._unix: dict[str, Any] = {}
        self.outside = Process(self, "world", "world")
        self.set_exception_handler(self._unexpected)

    get_debug = bool  # asked for each future: False, at the price of a C call

    def create_future(self) -> SimFuture:
        future = SimFuture(loop=self)
        self._made += 1
        future.serial = self._made
        return future

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> SimTask:  # type: ignore[override]
        task = SimTask(coro, loop=self, name=name, context=context)
        self._made += 1
        task.serial = self._made
        self._tasks.append(weakref.ref(task))
        return task

    def tasks(self, loop: Any = None) -> set[asyncio.Task[Any]]:
        """As `asyncio.all_tasks`, whose own list is of all loops that ever were."""
        return {task for task in (each() for each in self._tasks) if task is not None and not task.done()}

    def next_process(self) -> int:
        self._processes += 1
        return self._processes

    # ---- time and order -----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now + self._here().offset_s

    def at(self, when: float, process: Process, call: Callable[[], None]) -> None:
        """Call on the loop at a virtual time, whatever the process does; not a callback of it."""
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, process, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """As `at`, of the world itself."""
        self.at(self.now + delay_s, self.outside, call)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> SimHandle:
        context = context if context is not None else contextvars.copy_context()
        handle = SimHandle(callback, args, context, False)
        process: Process = context.get(PROCESS, self.outside)
        if process.alive:
            ready = process.ready
            if not ready:
                self._with_work[process] = None
                self.moved = True
            ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> SimHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> SimHandle:
        context = context if context is not None else contextvars.copy_context()
        handle = SimHandle(callback, args, context, True)
        self._serial += 1
        here = self._here()
        early_s = EARLY_S * (self._serial & 1)
        heapq.heappush(self._timers, (max(self.now, when - here.offset_s - early_s), self._serial, here, handle))
        return handle

    def _here(self) -> Process:
        return PROCESS.get(self.outside)

    def _queue(self, handle: SimHandle) -> None:
        process: Process = handle.context.get(PROCESS, self.outside)
        if process.alive:
            if not process.ready:
                self._with_work[process] = None
                self.moved = True
            process.ready.append(handle)

    def _run_once(self) -> None:
        # Many steps at a time: this is where the time of a run goes.
        timers, working = self._timers, self._with_work
        chance = self.random.random
        moved_at = self.steps
        candidates: list[Process] = []
        self.moved = True
        while not self._stopping:  # type: ignore[attr-defined]
            if self.moved:
                self.moved = False
                candidates = [p for p in working if p.ready and not p.paused]
            if not candidates:
                for process in [p for p in working if not p.alive or not p.ready]:
                    del working[process]
                if not timers:
                    raise RuntimeError("the world stands still for ever")
                if timers[0][0] > self.now:
                    self.now, moved_at = timers[0][0], self.steps
            if timers and timers[0][0] <= self.now:
                _, _, process, due = heapq.heappop(timers)
                if not isinstance(due, SimHandle):
                    due()
                elif not due._cancelled:
                    self._queue(due)
                continue
            if not candidates:
                continue
            chosen = candidates[0] if len(candidates) == 1 else candidates[int(chance() * len(candidates))]
            ready = chosen.ready
            handle = ready.popleft()
            if not ready:
                self.moved = True
            if handle._cancelled:
                continue
            self.steps += 1
            if self.steps - moved_at > MOST_AT_ONCE:
                raise RuntimeError(f"{chosen.name} goes round and round, and no time passes")
            self.fingerprint = hash((self.fingerprint, self.now, chosen.number))
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"a callback of {chosen}", "exception": error})

    # ---- threads ------------------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        process, context = self._here(), contextvars.copy_context()
        future = self.create_future()
        job = Job(self, process, lambda: context.run(func, *args), future)
        self.kept.append(job)
        if executor is None or getattr(executor, "_max_workers", 0) != 1:
            self.at(self.now + self._thread_delay(), process, lambda: self._begin(job))
            return future
        line = self._executors.setdefault(id(executor), deque())
        self.kept.append(executor)
        line.append(job)

        def following() -> None:
            if line and line[0] is job:
                line.popleft()
            if line:
                following_job = line[0]
                self.at(self.now + self._thread_delay(), process, lambda: self._begin(following_job))

        job.then = following
        if len(line) == 1:
            self.at(self.now + self._thread_delay(), process, lambda: self._begin(job))
        return future

    def _begin(self, job: Job) -> None:
        if job.process.paused:
            self.at(self.now + STOPPED_LOOK_S, job.process, lambda: self._begin(job))
        elif job.process.alive and job.future.cancelled() and not job.begun:
            job.over = True
            job.process.jobs.remove(job)
            job.then()
        elif job.process.alive:
            job.step()

    def _thread_delay(self) -> float:
        return self._thread_random.uniform(0.00002, 0.0004)

    # ---- Unix sockets (simulated: see local) -----------------------------------------------------------------------------

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:  # type: ignore[override]
        from tests.simulation.local import listen

        return listen(self, self._unix, protocol_factory, str(path), self._here())

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:  # type: ignore[override]
        from tests.simulation.local import dial

        return await dial(self, self._unix, protocol_factory, str(path), self._here())

    # ---- the end ----------------------------------------------------------------------------------------------------------

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _unexpected(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # A gather that was cancelled with its caller may be collected unasked, whenever Python collects: that fails nobody.
        if error is not None and not isinstance(error, (Killed, GeneratorExit, asyncio.CancelledError)):
            self.failures.append(f"{context.get('message')}: {error!r}")

    def end(self) -> None:
        """Let nothing run any more, threads included."""
        self.set_exception_handler(lambda *_: None)
        processes = {job.process for job in self.kept if isinstance(job, Job)}
        for process in processes:
            process.alive = False
        for job in [j for j in self.kept if isinstance(j, Job)]:
            if not job.over:
                job.kill()
        for task in sorted(self.tasks(), key=hash):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]

    def forget(self) -> None:
        """Collect what was kept: coroutines of the dead unwind now, into a world that is gone, and may say what they like."""
        before, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            self.kept.clear()
            self._timers.clear()
            self._tasks.clear()
            self._with_work.clear()
            self._executors.clear()
            self._unix.clear()
            SimLoop.forgotten += 1
            if SimLoop.collect_every and SimLoop.forgotten % SimLoop.collect_every == 0:
                gc.collect()
        finally:
            sys.unraisablehook = before
