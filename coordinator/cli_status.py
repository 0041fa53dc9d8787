"""The command `status`: once, or kept up to date until it is interrupted.

The rule: a coordinator in trouble is a sight, not the end of watching. Questions are asked by a thread of their own, so that
what is shown is never older than a second without saying so; only what no repeat can mend (a wrong token) ends it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from coordinator.cli_options import AsJson, Root, Target, Timeout, TokenFile, Wait, make_client
from coordinator.cli_output import emit, plain, problem_document, reporting, show
from coordinator.wire.errors import Reason, SafepointError, Unanswered

if TYPE_CHECKING:
    from coordinator.cli_live import Look
    from coordinator.client import Client

ONCE_WITHIN_S: Final = 1.0  # as fast as a sound coordinator answers, whatever else is stuck
ANSWER_WITHIN_S: Final = 2.0  # then it is asked again; that nobody answers is shown after one
FRAME_S: Final = 0.25
# What a coordinator in trouble may answer, and a sound one will not any more.
_PASSING: Final = frozenset({Reason.UNREACHABLE, Reason.UNAVAILABLE, Reason.LIMIT_EXCEEDED, Reason.INTERNAL})


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until interrupted.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="S", help="Seconds between two looks.")
    ] = 1.0,
    rollouts: Annotated[
        int, typer.Option("--rollouts", min=0, max=1000, help="Live rollouts to show of each participant.")
    ] = 0,
    timeout: Timeout = None,
    target: Target = "",
    root: Root = "",
    token_file: TokenFile = "",
    wait: Wait = ONCE_WITHIN_S,
    as_json: AsJson = False,
) -> None:
    """Show the operation with the time that its phase has left, who blocks it and on what, and every participant.

    With --watch it is kept up to date on a terminal; in a pipe a block of lines, or with --json a line of JSON, at each look.
    Also when the coordinator hangs: then since when, and without --watch that is said after a second, or `--wait`. In flight are requests that a server runs, not rollouts: an agent whose
    /run calls its own /v1/responses has two for each.

    Example: safepoint status --watch --rollouts 10
    """
    with reporting(as_json):
        if watch:
            with make_client(target, root, token_file, 0.0, as_json, patient=False) as client:
                _watch(client, interval, rollouts, timeout, as_json)
            return
        from coordinator.cli_live import ASKED, Look, view

        with make_client(target, root, token_file, wait, as_json) as client:
            asked = rollouts if as_json else max(rollouts, ASKED)
            within_s = max(wait, ONCE_WITHIN_S) if timeout is None else timeout
            answer = client.status(participants=True, max_rollouts=asked, timeout=within_s)
        if as_json:
            emit(plain(answer))
        else:
            show(view(Look(answer), 0.0, rollouts))


class Watcher:
    """Asks again and again in a thread; `look` is the present state, `fatal` what ends it."""

    def __init__(self, ask: Callable[[], Any], interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        from coordinator.cli_live import Look

        self.look: Look = Look()
        self.error: SafepointError | None = None  # the last answer's
        self.fatal: SafepointError | None = None
        self.news = threading.Event()
        self._ask, self._interval_s, self._clock = ask, interval_s, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safepoint-watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # it ends with its call; nobody waits for one that hangs

    def next_word(self, interval_s: float) -> Look:
        """Wait for something new to say: an answer, or that none comes; that again after each interval. Raises `fatal`."""
        silent_until = self._clock() + interval_s if self.look.silent_s(self._clock()) is not None else 0.0
        while True:
            now = self._clock()
            came = self.news.wait(silent_until - now if silent_until > now else self.look.word_in_s(now, interval_s))
            self.news.clear()
            if self.fatal is not None:
                raise self.fatal
            look = self.look
            if look.silent_s(self._clock()) is None:
                if came:
                    return look
            elif self._clock() >= silent_until:
                return look

    def _run(self) -> None:
        while not self._ended.is_set():
            self.look = self.look.asking(self._clock())
            try:
                answer = self._ask()
            except SafepointError as error:
                self.error = error
                if not (isinstance(error, Unanswered) or error.reason in _PASSING):
                    self.fatal = error
                self.look = self.look.failed(f"{error.problem.message} Next: {error.problem.advice}")
            except Exception:
                if self._ended.is_set():
                    return  # the client was closed under it
                raise
            else:
                self.error = None
                self.look = self.look.answered(answer, self._clock())
            self.news.set()
            if self.fatal is not None or self._ended.wait(self._interval_s):
                return


def _watch(client: Client, interval_s: float, rollouts: int, timeout_s: float | None, as_json: bool) -> None:
    from coordinator.cli_live import ASKED

    asked = rollouts if as_json else max(rollouts, ASKED)
    within_s = ANSWER_WITHIN_S if timeout_s is None else timeout_s
    watcher = Watcher(lambda: client.status(participants=True, max_rollouts=asked, timeout=within_s), interval_s)
    with watcher:
        try:
            if as_json or not sys.stdout.isatty():
                _lines(watcher, interval_s, rollouts, as_json)
            else:
                _screen(watcher, rollouts)
        except BrokenPipeError:  # whoever read it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lines(watcher: Watcher, interval_s: float, rollouts: int, as_json: bool) -> None:
    from coordinator.cli_live import view

    while True:
        look = watcher.next_word(interval_s)
        now = time.monotonic()
        if not as_json:
            show(view(look, now, rollouts))
        elif (silent_s := look.silent_s(now)) is None and look.status is not None:
            emit(plain(look.status))
        elif silent_s is not None:
            error = problem_document(watcher.error.problem) if watcher.error is not None else None
            emit({"unanswered_for_s": round(silent_s, 3), "error": error})


def _screen(watcher: Watcher, rollouts: int) -> None:
    from rich.console import Console
    from rich.live import Live

    from coordinator.cli_live import view

    console = Console(highlight=False)
    watcher.next_word(0.0)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while watcher.fatal is None:
            live.update(view(watcher.look, time.monotonic(), rollouts, bars=True), refresh=True)
            watcher.news.wait(FRAME_S)
            watcher.news.clear()
        raise watcher.fatal
