"""`headrace train`: start, dry-run, resume and stop a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headrace.cli.app import app
from headrace.cli.console import logged, say, shown
from headrace.config import Config
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.line.display import LiveDisplay, LogDisplay
    from headrace.line.handle import Line
    from headrace.runs.results import LineResult

SUMMARY_STEPS = 3
"""The summary's reward is the mean over this many last steps."""

_TRAIN_EXAMPLES = """[bold]Examples[/bold]

  headrace train examples/addition.toml

  headrace train examples/addition.toml --set line.steps=30 --set trainer.learning_rate=2e-5

  headrace train examples/addition.toml --dry-run

  headrace train --resume runs/addition-001"""


@app.command(epilog=_TRAIN_EXAMPLES)
def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="The run's settings.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="Change one setting; may be given many times."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder, a new one (default: runs/<CONFIG>-<number>)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show settings and memory, try the environment, train nothing.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder.")
    ] = None,
) -> None:
    """Train a model, and measure held-out reward before and after.

    Ctrl-C once (or SIGTERM): finish the unit of work, write a checkpoint, say how to resume.

    Twice: stop now; the last checkpoint is intact. Either way the exit code is 130 (143 for SIGTERM).
    """
    console = Console()
    if resume is not None:
        if config is not None or overrides or run_dir is not None or dry_run:
            raise UserError("--resume takes the run's own settings; give it alone")
        _resume(resume, console)
    elif config is None:
        raise UserError("give a CONFIG.toml to start a run, or --resume DIR to continue one")
    elif dry_run:
        _dry_run(Config.load(config, overrides or ()), run_dir, console)
    else:
        settings = Config.load(config, overrides or ())
        from headrace.line.handle import Line

        _run(Line.from_config(settings, run_dir, name=config.stem), console)


def _resume(run_dir: Path, console: Console) -> None:
    from headrace.line.handle import Line
    from headrace.runs.folder import RunFolder

    with RunFolder.open(run_dir, read_only=True) as folder:
        complete = folder.complete
    if complete:
        say(console, f"{run_dir} is complete; its model is in {shown(folder.final_path)}")
    else:
        _run(Line.resume(run_dir), console)


def _dry_run(config: Config, run_dir: Path | None, console: Console) -> None:
    import tomli_w

    from headrace.line.dry_run import dry_run

    with logged(console):
        checked = dry_run(config, run_dir)
    say(console, tomli_w.dumps(config.to_dict()))
    say(console, "memory, roughly")
    for name, megabytes in checked.memory_mb.items():
        say(console, f"  {name:22} {megabytes:10,.1f} MB")
    say(console, f"\nfirst task ({checked.prompt_tokens} tokens of at most {checked.context_tokens})")
    say(console, f"  {checked.prompt}")
    say(console, "\nthe environment answers; nothing was trained or written")


def _run(line: Line, console: Console) -> None:
    """Run a line under a display, stopping it on request, and say what came of it."""
    from headrace.line.display import make_display

    result = None
    with (
        make_display(console, shown(line.run_dir)) as display,
        logged(console),
        _stops(line, display) as stopped,
        suppress(KeyboardInterrupt),
    ):
        result = line.run(display)
    if result is None or result.interrupted:
        if result is None:
            say(console, "stopped at once; what came after the last checkpoint is lost")
        else:
            step, steps = len(result.metrics), line.config.line.steps
            say(console, f"stopped after step {step} of {steps}; a checkpoint is written")
        if line.run_dir.exists():
            say(console, f"resume with: headrace train --resume {shown(line.run_dir)}")
        raise typer.Exit(128 + stopped[0])
    _summarise(result, console)


@contextmanager
def _stops(line: Line, display: LiveDisplay | LogDisplay) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM inside the block: the first stops the line, the next ones raise KeyboardInterrupt.

    Yields the signals that came.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        line.stop()
        display.announce("stopping after this unit of work, with a checkpoint; once more stops now")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _summarise(result: LineResult, console: Console) -> None:
    from headrace.line.display import clock, evaluation_text

    last = result.rewards[-SUMMARY_STEPS:]
    rows = [
        ("held-out before", evaluation_text(result.before) if result.before else "not measured"),
        ("held-out after", evaluation_text(result.after) if result.after else "not measured"),
        ("reward", f"{sum(last) / len(last):.3f}, mean of the last {len(last)} steps"),
        ("training time", f"{clock(result.training_seconds)} for {len(result.metrics)} steps"),
        ("run folder", shown(result.run_dir)),
        ("model", shown(result.run_dir / "final")),
    ]
    for name, value in rows:
        say(console, f"{name:16} {value}")
    if not any(step["tokens_trained"] for step in result.metrics):
        say(
            console,
            "nothing was learned: in no step did the samples of a group earn different rewards; "
            + _cure(result.rewards),
        )


def _cure(rewards: list[float]) -> str:
    """What to do about rewards that do not differ: all of them are the best there is, or none is."""
    if min(rewards) > 0 and min(rewards) == max(rewards):
        return "every answer earned the same, so make the tasks harder, or let the reward tell good answers apart"
    return "make the tasks easier, or give partial credit"
