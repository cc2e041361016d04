"""`headrace runs`: what runs did, read from their journals, also while they go on."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.app import app
from headrace.cli.console import logged, say, shown
from headrace.cli.folders import RUN_HELP, RUNS, open_run
from headrace.cli.tables import ago, attempts_table, cell, number, span, steps_table
from headrace.errors import ConfigError, HeadraceError, UserError

if TYPE_CHECKING:
    from headrace.line.retake import RetakenStep
    from headrace.runs.folder import RunFolder
    from headrace.runs.history import History

SHOWN_STEPS = 20
"""The steps that `headrace runs show` shows unless told otherwise."""

SHOWN_TRAJECTORIES = 40
"""The trajectories that `headrace runs trajectories` shows unless told otherwise."""

_Run = Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)]

runs = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]}
)
app.add_typer(runs, name="runs", help="Look at runs: list them, show one, its trajectories, replay it.")


@runs.command(
    name="list", epilog="[bold]Examples[/bold]\n\n  headrace runs list\n\n  headrace runs list elsewhere/runs"
)
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are.")] = RUNS,
) -> None:
    """List the runs in a folder: how far they are, what they earn, whether they go on or how they ended.

    The reward is that of the last step, in training; the held-out one is that after training, or else before.
    """
    from headrace.runs.folder import CONFIG

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that holds the runs")
    console = Console()
    table = Table()
    for column, justify in (
        ("run", "left"),
        ("steps", "right"),
        ("last reward", "right"),
        ("held-out reward", "left"),
        ("state", "left"),
        ("last", "left"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    paths = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    for path in paths:
        table.add_row(cell(path.name, console), *_listed(path))
    if not paths:
        raise UserError(
            f"{folder} holds no runs; give the folder that holds them (a run's own is for `runs show`)"
        )
    console.print(table)


@runs.command(epilog="[bold]Examples[/bold]\n\n  headrace runs show runs/addition-001")
def show(
    run: _Run,
    last: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, help="The last N steps; 0 is all.")
    ] = SHOWN_STEPS,
) -> None:
    """Show a run: its settings, the rewards and lengths of its steps, and where its tokens went."""
    from headrace.line.display import evaluation_text
    from headrace.runs.endings import held_out, state_of
    from headrace.runs.reading import read_history

    console = Console()
    folder = open_run(run)
    history = read_history(folder, light=True)
    config = folder.config
    done = max(history.steps, default=0)
    rows = [
        ("run", shown(folder.path)),
        (
            "state",
            f"{state_of(folder, history)}, {done} of {config.line.steps} steps, {ago(_last_at(folder, history))}",
        ),
        ("model", config.model.name),
        ("environment", config.environment.name),
        (
            "batch",
            f"{config.line.groups_per_step} groups of {config.algorithm.group_size}, "
            f"up to {config.sampling.max_tokens} tokens each, staleness up to {config.line.max_staleness}",
        ),
        ("learning rate", f"{config.trainer.learning_rate:g}, {config.trainer.schedule}"),
        ("starts", str(history.starts)),
    ]
    for name in ("before", "after"):
        evaluation = held_out(folder, name)
        rows.append((f"held-out {name}", evaluation_text(evaluation) if evaluation else "not measured"))
    for name, value in rows:
        say(console, f"{name:16} {value}")
    _say_damage(console, folder, history)
    steps = list(history.steps.values())[-last if last else 0 :]
    if steps:
        console.print(steps_table(steps, len(history.steps)))
        _say_ledger(console, history)


@runs.command(
    epilog="[bold]Examples[/bold]\n\n  headrace runs trajectories runs/addition-001 --step 3\n\n"
    "  headrace runs trajectories runs/addition-001 --best 5\n\n"
    "  headrace runs trajectories runs/addition-001 --show 12.0.0"
)
def trajectories(
    run: _Run,
    step: Annotated[int | None, typer.Option(metavar="N", help="Those that step N consumed.")] = None,
    group: Annotated[int | None, typer.Option(metavar="G", help="Those of one group.")] = None,
    one: Annotated[
        str | None,
        typer.Option("--show", metavar="G.S.A", help="One of them as text: group, sample, attempt."),
    ] = None,
    best: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The N with the highest rewards.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The N with the lowest rewards.")
    ] = None,
) -> None:
    """List a run's trajectories, those in flight too, or show one of them as text."""
    from headrace.runs.reading import read_history

    console = Console()
    folder = open_run(run)
    if not folder.journal_path.exists():
        raise UserError(
            f"{shown(folder.path)} has no {folder.journal_path.name}; what its steps consumed is in trajectories.jsonl"
        )
    if one is not None:
        _show_one(console, folder, one)
        return
    if best is not None and worst is not None:
        raise UserError("give --best or --worst, not both")
    history = read_history(folder)
    if step is not None and step not in history.steps:
        raise UserError(f"{shown(folder.path)} has no step {step}; it has {span(list(history.steps))}")
    if group is not None and group not in history.groups:
        raise UserError(f"{shown(folder.path)} has no group {group}; it has {span(list(history.groups))}")
    _say_damage(console, folder, history)
    found = [
        attempt
        for attempt in history.attempts.values()
        if (step is None or attempt.step == step) and (group is None or attempt.id.group == group)
    ]
    total = len(found)
    if best is not None or worst is not None:
        rewarded = [(attempt.reward, attempt) for attempt in found if attempt.reward is not None]
        rewarded.sort(key=lambda pair: pair[0], reverse=best is not None)
        found = [attempt for _, attempt in rewarded[: best or worst]]
    elif step is None and group is None:
        found = found[-SHOWN_TRAJECTORIES:]
    console.print(attempts_table(found, history, console))
    if len(found) < total:
        say(console, f"{len(found)} of {total}; choose with --step, --group, --best or --worst")


@runs.command(epilog="[bold]Examples[/bold]\n\n  headrace runs replay runs/addition-001")
def replay(run: _Run) -> None:
    """Compute a run's weights again from its journal, and compare them step by step, bit for bit.

    Exit code 1 if any step's weights differ.
    """
    console = Console()
    with open_run(run) as folder:  # what is no run folder is refused before the libraries load
        path = folder.path
    from headrace.line import replay as replaying

    def tell(step: RetakenStep) -> None:
        said = f"equal    {step.recorded[:16]}"
        if not step.equal:
            said = f"differs  {step.recorded[:16]} was recorded, {step.retaken[:16]} came out"
        if not step.equal and not step.checkable:
            said = "not checkable here: other kernels (instruction set, torch or build) took it"
        say(console, f"step {step.step:5}  {said}")

    with logged(console):
        steps = replaying.replay(path, tell)
    differing = [step.step for step in steps if not step.equal and step.checkable]
    if differing:
        say(console, f"{len(differing)} of {len(steps)} steps differ, the first is step {differing[0]}")
        raise typer.Exit(1)
    elsewhere = sum(not step.equal for step in steps)
    if elsewhere:
        say(console, f"{len(steps) - elsewhere} steps equal, {elsewhere} not checkable here")
        return
    say(console, f"{len(steps)} steps, all equal")


# Inside


def _listed(path: Path) -> tuple[str, ...]:
    """A run's row, without its name. Of a run that cannot be read it says what is wrong, and `show` says more."""
    from headrace.runs.endings import held_out, state_of
    from headrace.runs.reading import UnreadableRun, read_history
    from headrace.state.journal_file import OtherFormat

    try:
        folder = open_run(path)
        history = read_history(folder, light=True)
        done = max(history.steps, default=0)
        reward = number(history.steps[done].metrics.get("reward_mean")) if done else ""
        measured = [(name, held_out(folder, name)) for name in ("after", "before")]
        held = next((f"{_held_out(one.reward)} {name}" for name, one in measured if one is not None), "")
        state = state_of(folder, history)
        return f"{done}/{folder.config.line.steps}", reward, held, state, ago(_last_at(folder, history))
    except ConfigError:
        why = "its settings cannot be read"
    except UnreadableRun as error:
        why = error.reason
    except OtherFormat:
        why = "of an earlier version"
    except (HeadraceError, OSError):
        why = "it cannot be read"
    return "", "", "", why, ""


def _held_out(reward: float) -> str:
    return number(reward) if math.isfinite(reward) else "unknown"


def _say_damage(console: Console, folder: RunFolder, history: History) -> None:
    if history.damage is None:
        return
    say(
        console,
        f"{folder.journal_path.name} is damaged {history.damage}. Here is what stands before that; "
        f"`headrace train --resume {shown(folder.path)}` goes on without the rest",
    )


def _say_ledger(console: Console, history: History) -> None:
    """Where the tokens of all steps went."""
    from headrace.schedule import Bucket

    metrics = [step.metrics for step in history.steps.values()]
    generated = max((line.get("tokens_generated_total") or 0 for line in metrics), default=0)
    settled = {bucket: sum(line.get(f"ledger_{bucket}") or 0 for line in metrics) for bucket in Bucket}
    say(console, f"\n{generated:,} tokens sampled up to the last step")
    in_flight = generated - sum(settled.values())
    for name, tokens in [*settled.items(), ("in flight", in_flight)]:
        if tokens or name in (Bucket.TRAINED, Bucket.LOST):
            say(console, f"  {name:20} {tokens:12,} {tokens / max(generated, 1):7.1%}")


def _show_one(console: Console, folder: RunFolder, name: str) -> None:
    from headrace.runs.reading import read_history
    from headrace.runs.transcript import transcript
    from headrace.types import TrajectoryId

    if not re.fullmatch(r"\d+\.\d+\.\d+", name):
        raise UserError(f"--show {name}: write group.sample.attempt, for example 12.0.0")
    key = TrajectoryId(*map(int, name.split(".")))
    history = read_history(folder, keep=key)
    there = history.of_group(key.group)
    attempt = next((one for one in there if one.id == key), None)
    if attempt is None:
        hint = ", ".join(str(one.id) for one in there) or f"groups {span(list(history.groups))}"
        raise UserError(f"--show {name}: {shown(folder.path)} has no such trajectory; it has {hint}")
    _say_damage(console, folder, history)
    reward = "" if attempt.reward is None else f", reward {attempt.reward:.6g}"
    step = "" if attempt.step is None else f", consumed by step {attempt.step}"
    went = "" if attempt.bucket is None else f", {attempt.bucket}"
    say(
        console,
        f"{key}: {attempt.status}{reward}, {attempt.tokens} tokens in {attempt.turns} turns{step}{went}",
    )
    for passage in transcript(history, folder):
        say(console, f"\n[{passage.who}]\n{passage.text}")


def _last_at(folder: RunFolder, history: History) -> float:
    """When something last happened in a run, unix time."""
    files = [folder.path / name for name in ("metrics.jsonl", "config.toml")]
    times = [file.stat().st_mtime for file in files if file.exists()]
    return max(times if history.last is None else [*times, history.last[1]])
