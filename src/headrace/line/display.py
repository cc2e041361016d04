"""What a run looks like while it runs: a live display on a terminal, plain log lines anywhere else.

Invariants
* `announce` may be called from a signal handler: it only stores the text, and another thread shows it.
* A run that says nothing for `HEARTBEAT_S` says in one log line what it is doing or waiting on.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.line.observer import LineStatus, Observer
from headrace.runs.printable import printable
from headrace.runs.results import Evaluation
from headrace.schedule.units import UnitKind

HEARTBEAT_S = 30.0
"""Seconds of silence after which a log says what the line is doing."""

_POLL_S = 0.2
_REFRESH_PER_S = 4
_SPARKLINE_WIDTH = 40
_BAR_WIDTH = 40
_SAME_POLICY_ESS = 0.999  # above it only rounding tells the rollouts' policy from the trained one
_BARS = "▁▂▃▄▅▆▇█"
_DOING: dict[str, str] = {
    UnitKind.DECODE: "generating",
    UnitKind.GRADIENT: "taking gradients",
    UnitKind.OPTIMIZER_STEP: "updating the weights",
}
_PREPARING = "preparing: environment, model, held-out reward"
_FINISHING = "finishing: checkpoint, final model, held-out reward"


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None
) -> str:
    """A curve in one line of at most `width` characters.

    A longer history is cut into `width` stretches, each shown by its mean. What is not finite is a blank.
    Without `low` and `high` the curve fills the line's height; a constant one lies in the middle.
    """
    if width < 1:
        return ""
    count = len(values)
    columns = min(count, width)
    means = [_finite_mean(values[i * count // columns : (i + 1) * count // columns]) for i in range(columns)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * columns
    bottom = min(known) if low is None else low
    top = max(known) if high is None else high

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        height = (value - bottom) / (top - bottom) if top > bottom else 0.5
        return _BARS[round(max(0.0, min(1.0, height)) * (len(_BARS) - 1))]

    return "".join(map(bar, means))


def _finite_mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def reward_curve(rewards: Sequence[float], width: int) -> str:
    """The sparkline of rewards, on the scale 0 to 1 where they fit in it."""
    if all(0 <= reward <= 1 for reward in rewards if math.isfinite(reward)):
        return sparkline(rewards, width, 0.0, 1.0)
    return sparkline(rewards, width)


def clock(seconds: float) -> str:
    """Seconds as people read them: `42 s`, `3:05`, `1:02:03`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def evaluation_text(evaluation: Evaluation) -> str:
    """Held-out reward in a few words."""
    count = len(evaluation.tasks)
    valid = count - evaluation.failed
    if not valid:
        return f"unknown (the environment failed on all of {count} tasks)" if count else "not measured"
    failed = f"; the environment failed on {evaluation.failed} more" if evaluation.failed else ""
    return f"{evaluation.reward:.3f} on {valid} tasks{failed}"


def activity(status: LineStatus) -> str:
    """What the line does or waits on, and where its trajectories are."""
    if status.step >= status.steps:
        return _FINISHING
    return (
        f"{_DOING.get(status.doing, status.doing)}; {status.decoding} in the engine, "
        f"{status.at_environment} at the environment, {status.ready} groups ready, "
        f"{status.committed} of {status.groups_per_step} committed"
    )


class _Display(Observer):
    """Keeps the line's last status; `title` names the run's folder."""

    def __init__(self, console: Console, title: str = "") -> None:
        self._console = console
        self._title = printable(title, console.file)
        self._status: LineStatus | None = None
        self._announced = ""

    def announce(self, text: str) -> None:
        """Show a text soon. Safe in a signal handler."""
        self._announced = text

    def on_status(self, status: LineStatus) -> None:
        self._status = status

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        if self._status is not None:
            # No status follows the last step, so it is brought up to date here.
            rewards = (*self._status.reward_history, float(metrics["reward_mean"]))
            self._status = replace(self._status, step=int(metrics["step"]), reward_history=rewards)

    def on_evaluation(self, name: str, evaluation: Evaluation) -> None:
        self.on_message(f"held-out reward {name} training: {evaluation_text(evaluation)}")

    def _activity(self) -> str:
        return _PREPARING if self._status is None else activity(self._status)

    def _print(self, text: str) -> None:
        self._console.print(
            printable(text, self._console.file), markup=False, highlight=False, soft_wrap=True
        )


class LiveDisplay(_Display):
    """A few lines at the bottom of the terminal that follow the run, with messages above them."""

    def __init__(self, console: Console, title: str = "") -> None:
        super().__init__(console, title)
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=_REFRESH_PER_S, transient=True
        )

    def __enter__(self) -> Self:
        # What the environment's processes print would tear the display apart: it is shown above it, line by line.
        printed, self.output = os.pipe()
        self._relay = threading.Thread(
            target=self._show_printed, args=(printed,), name="environment output", daemon=True
        )
        self._live.start()
        self._relay.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.output is not None:
            os.close(self.output)
            self._relay.join(
                timeout=1.0
            )  # it ends when the environment's processes have closed their end too
        self._live.stop()
        if self._status is not None:
            self._console.print(self.render(closed=True))

    def _show_printed(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._print(f"environment: {line.rstrip()}")

    def on_message(self, text: str) -> None:
        self._print(text)

    def render(self, closed: bool = False) -> RenderableType:
        """The display now; `closed` is what stays when the run is over."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column()
        if self._title:
            rows.add_row("run", Text(self._title, overflow="fold"))
        status = self._status
        if status is not None:
            rows.add_row("step", _progress(status))
            rows.add_row("reward", _rewards(status))
            rows.add_row("flow", Text(_flow(status)))
        if closed:
            return rows
        rows.add_row("now", Text(self._activity()))
        return Group(rows, Text(self._announced, style="bold yellow")) if self._announced else rows


def _progress(status: LineStatus) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    left = "" if status.seconds_left is None else f"about {clock(status.seconds_left)} left"
    row.add_row(
        ProgressBar(total=status.steps, completed=status.step, width=_BAR_WIDTH),
        f"{status.step} of {status.steps}",
        left if status.step < status.steps else "",
    )
    return row


def _rewards(status: LineStatus) -> Text:
    history = status.reward_history
    if not history:
        return Text("after the first step", style="dim")
    curve = Text(reward_curve(history, _SPARKLINE_WIDTH), style="green")
    return curve.append(f"  {history[-1]:.3f}", style="bold")


def _flow(status: LineStatus) -> str:
    return (
        f"generator {_rate(status.decode_tokens_per_s)}, trainer {_rate(status.train_tokens_per_s)}, "
        f"staleness {status.staleness_mean:.2f}"
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tok/s" if tokens_per_s > 0 else "–"


class LogDisplay(_Display):
    """One line per step and message; after a silence, one about what the line is doing.

    Args:
        heartbeat_s: the silence, in seconds.
    """

    def __init__(self, console: Console, title: str = "", heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__(console, title)
        self._heartbeat_s = heartbeat_s
        self._last_line = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="log display", daemon=True)

    def __enter__(self) -> Self:
        self._last_line = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(timeout=1.0)
        self._show_announced()

    def on_message(self, text: str) -> None:
        self._say(text)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        super().on_step(metrics)
        self._say(step_line(metrics, None if self._status is None else self._status.steps))

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._title:
            self._print(f"run folder {self._title}")
            self._title = ""
        self._print(text)

    def _show_announced(self) -> None:
        text, self._announced = self._announced, ""
        if text:
            self._say(text)

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            self._show_announced()
            if time.monotonic() - self._last_line >= self._heartbeat_s:
                self._say(self._activity())


def step_line(metrics: Mapping[str, Any], steps: int | None) -> str:
    """One step as a log line."""
    step, seconds = int(metrics["step"]), float(metrics["time_step_s"])
    parts = [
        f"step {step}" + (f"/{steps}" if steps else ""),
        f"reward {metrics['reward_mean']:.3f}",
        f"loss {metrics['loss']:.4f}",
        f"grad norm {metrics['grad_norm']:.3g}",
        f"staleness {metrics['staleness_mean']:.2f}",
        *_mismatch(metrics["mismatch_ess"]),
        f"generated {_pace(metrics['tokens_generated'], metrics['time_decode_s'])}",
        f"trained {_pace(metrics['tokens_trained'], metrics['time_gradient_s'])}",
        f"{seconds:.1f} s",
    ]
    if steps and step < steps:
        parts.append(f"about {clock(seconds * (steps - step))} left")
    return "  ".join(parts)


def _mismatch(ess: float | None) -> list[str]:
    """How much of the rollouts is left for the policy that is trained, where they come from another one."""
    return [f"mismatch ESS {ess:.2f}"] if ess is not None and ess < _SAME_POLICY_ESS else []


def _pace(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens" + (f" at {tokens / seconds:,.0f}/s" if tokens and seconds > 0 else "")


def make_display(console: Console, title: str = "") -> LiveDisplay | LogDisplay:
    """The display that suits the console, as a context manager."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, title)
    return LogDisplay(console, title)
