"""The live episodes of one worker process, on one event loop.

Invariants
* Each episode has its own instance of the user's class, and one request of it is served at a time. Requests of
  several episodes are served at once as far as their methods are async; plain ones take turns.
* `Began` is sent right before each call of a user's method, so that the parent knows which calls were going on if the
  process falls silent. No call takes longer than `timeout_s`: an async one is cancelled then; if a call blocks the
  loop, the parent kills the process.
* An episode fails alone, whatever its methods raise. Each one that came here ends with exactly one `Closed`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.environments.base import Action, Observation, Step
from headrace.environments.messages import (
    Act,
    Answered,
    Began,
    Close,
    Closed,
    EpisodeRequest,
    Refused,
    Reply,
    Reset,
    Restore,
)
from headrace.environments.options import describe_exception, shortened
from headrace.environments.validation import validate_observation, validate_snapshot, validate_step
from headrace.errors import EnvironmentSetupError


@dataclass(slots=True)
class _Live:
    """An episode that is served here.

    Attributes:
        instance: of the user's class; None until it is built.
        tools: what its `reset` gave; None if it was restored from a snapshot.
        serving: the task of its latest request.
        running: every task that runs for it, also those that were cancelled and still clean up.
    """

    number: int
    instance: Any = None
    tools: list[dict[str, Any]] | None = None
    serving: asyncio.Task[None] | None = None
    running: set[asyncio.Task[Any]] = field(default_factory=set)


class WorldServer:
    """Serves episodes. Every method is called on the event loop.

    Args:
        build: makes an instance of the user's class.
        folder: where the user's code lies, for the place of an error.
        timeout_s: how long one call of a method may take.
        send: tells the parent.
        watch: called with True before each call of a user's method, and with False when no call is going on any more.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        folder: Path | None,
        timeout_s: float,
        send: Callable[[Reply], None],
        watch: Callable[[bool], None],
    ) -> None:
        self._build = build
        self._folder = folder
        self._timeout_s = timeout_s
        self._send = send
        self._watch = watch
        self._live: dict[int, _Live] = {}
        self._calls = 0
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself holds tasks weakly

    def on_request(self, request: EpisodeRequest) -> None:
        """The parent asks something of an episode: begin to serve it, or close the episode."""
        if isinstance(request, Close):
            live = self._live.get(request.episode)
            if live is not None:  # else its `Closed` is on its way
                if live.serving is not None:
                    live.serving.cancel()
                self._close(live)
            return
        if isinstance(request, Reset | Restore):
            self._live[request.episode] = _Live(request.episode)
        live = self._live[request.episode]
        live.serving = self._start_task(self._serve(live, request), live)

    async def _serve(self, live: _Live, request: Reset | Act | Restore) -> None:
        try:
            step, snapshot = await self._answer(live, request)
        except (
            BaseException
        ) as error:  # nothing that user code raises may end the worker, SystemExit included
            if self._live.get(live.number) is not live:
                return  # given up meanwhile
            text = str(error) if isinstance(error, EnvironmentSetupError) else self._raised(request, error)
            self._send(Refused(live.number, text))
            self._close(live)
            return
        live.serving = None
        self._send(Answered(live.number, step, snapshot))
        if step is not None and step.done:
            self._close(live)

    async def _answer(self, live: _Live, request: Reset | Act | Restore) -> tuple[Step | None, Any]:
        if isinstance(request, Restore):
            await self._restore(live, request)
            return None, None
        if isinstance(request, Reset):
            step = await self._reset(live, request.task)
        else:
            step = await self._step(live, request.action)
        snapshot = None
        if not step.done and hasattr(live.instance, "snapshot"):
            snapshot = validate_snapshot(await self._call(live, "snapshot()", live.instance.snapshot))
        return step, snapshot

    async def _reset(self, live: _Live, task: dict[str, Any]) -> Step:
        self._build_instance(live)
        observation = validate_observation(
            await self._call(live, "reset(task)", live.instance.reset, task), "reset(task)"
        )
        live.tools = observation.tools
        return Step(observation)

    async def _step(self, live: _Live, action: Action) -> Step:
        step = validate_step(await self._call(live, "step(action)", live.instance.step, action))
        observation = step.observation
        if observation is not None and observation.tools:
            if live.tools is not None and observation.tools != live.tools:
                raise EnvironmentSetupError(
                    "step(action) returned other tools than reset(task); they stand at the beginning of the "
                    "conversation, so only reset can give them"
                )
            step = Step(Observation(observation.messages), step.reward, step.done, step.info)
        return step

    async def _restore(self, live: _Live, request: Restore) -> None:
        self._build_instance(live)
        if request.snapshot is not None and hasattr(live.instance, "restore"):
            restore = live.instance.restore
            await self._call(live, "restore(task, data)", restore, request.task, request.snapshot)
            return
        recorded, *rest = request.steps
        _compare(await self._reset(live, request.task), recorded, "reset(task)")
        for turn, (action, recorded) in enumerate(zip(request.actions, rest, strict=True), 1):
            _compare(await self._step(live, action), recorded, f"step(action) of turn {turn}")

    def _build_instance(self, live: _Live) -> None:
        self._call_begins(live)
        try:
            live.instance = self._build()
        finally:
            self._call_is_over()

    async def _call(self, live: _Live, what: str, method: Callable[..., Any], *args: Any) -> Any:
        """What `method(*args)` returns, awaited if it is awaitable."""
        self._call_begins(live)
        try:
            value = method(*args)
            if inspect.isawaitable(value):
                value = await self._await(live, value, what)
            return value
        finally:
            self._call_is_over()

    async def _await(self, live: _Live, awaitable: Awaitable[Any], what: str) -> Any:
        # Not asyncio.timeout: user code that swallows its cancellation would hold up the reply.
        task = self._start_task(_outcome(awaitable), live)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise EnvironmentSetupError(
                f"{what} gave nothing within {self._timeout_s:g} s (environment.timeout_s)"
            )
        value, error = task.result()
        if error is not None:
            raise error
        return value

    def _close(self, live: _Live) -> None:
        """The episode is over: nothing more is served for it."""
        del self._live[live.number]
        self._start_task(self._call_close(live))

    async def _call_close(self, live: _Live) -> None:
        if live.running:  # cancelled tasks of the user's may clean up first
            await asyncio.wait(set(live.running), timeout=self._timeout_s)
        error = None
        try:
            if callable(close := getattr(live.instance, "close", None)):
                await self._call(live, "close()", close)
        except EnvironmentSetupError as failure:
            error = str(failure)
        except BaseException as failure:
            error = self._raised("close()", failure)
        self._send(Closed(live.number, error))

    def _call_begins(self, live: _Live) -> None:
        self._calls += 1
        self._watch(True)
        self._send(Began(live.number))

    def _call_is_over(self) -> None:
        self._calls -= 1
        if self._calls == 0:
            self._watch(False)

    def _start_task(self, coroutine: Any, live: _Live | None = None) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        for tasks in (self._tasks, live.running) if live is not None else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def _raised(self, what: object, error: BaseException) -> str:
        return f"{what} raised {describe_exception(error, self._folder)}"


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """(what it returned, what it raised). Nothing is raised here: a SystemExit that left a task would end the loop."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _compare(step: Step, recorded: Step, what: str) -> None:
    """Raise EnvironmentSetupError if an instance that is told again what it was told answers otherwise."""
    for name in ("observation", "reward", "done"):
        now, then = getattr(step, name), getattr(recorded, name)
        if now != then:
            raise EnvironmentSetupError(
                f"the episode's worker was lost, and told again it went another way: the {name} of {what} is "
                f"{shortened(repr(now))} and was {shortened(repr(then))}; make it depend on the task and the actions "
                "alone, or write snapshot and restore"
            )
