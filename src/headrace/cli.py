"""The commands; no logic of their own.

Exit codes
* 0: done. 1: a run that had started cannot go on. 2: something given is wrong, and nothing was started.
* 130 (Ctrl-C) or 143 (SIGTERM): stopped on request; a run can be resumed.

Both errors are one line on standard error. Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace import __version__
from headrace.config import Config
from headrace.errors import HeadraceError, UserError

if TYPE_CHECKING:
    from headrace.line.display import LiveDisplay, LogDisplay
    from headrace.line.line import Line
    from headrace.line.observer import Evaluation, LineResult

SHOWN_COMPLETIONS = 10
"""Rows of the table that `headrace eval` prints."""

SUMMARY_STEPS = 3
"""The summary's reward is the mean over this many last steps."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point: turns what headrace raises on purpose into one line and an exit code."""
    try:
        app(prog_name="headrace")
    except KeyboardInterrupt:  # before a run had started, or outside one
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    except HeadraceError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(
    epilog="Start with: headrace train examples/addition.toml",
)
def _headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning of language models as one production line."""


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
    """Train a model, and measure held-out accuracy before and after.

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
        from headrace.line.line import Line

        _run(Line.from_config(settings, run_dir, name=config.stem), console)


def _resume(run_dir: Path, console: Console) -> None:
    from headrace.line.line import Line
    from headrace.line.run_folder import RunFolder

    with RunFolder.open(run_dir, read_only=True) as folder:
        complete = folder.complete
    if complete:
        _say(console, f"{run_dir} is complete; its model is in {_shown(folder.final_path)}")
    else:
        _run(Line.resume(run_dir), console)


def _dry_run(config: Config, run_dir: Path | None, console: Console) -> None:
    import tomli_w

    from headrace.line.dry_run import dry_run

    with _logged(console):
        checked = dry_run(config, run_dir)
    _say(console, tomli_w.dumps(config.to_dict()))
    _say(console, "memory, roughly")
    for name, megabytes in checked.memory_mb.items():
        _say(console, f"  {name:22} {megabytes:10,.1f} MB")
    _say(console, f"\nfirst task ({checked.prompt_tokens} tokens of at most {checked.context_tokens})")
    _say(console, f"  {checked.prompt}")
    _say(console, "\nthe environment answers; nothing was trained or written")


def _run(line: Line, console: Console) -> None:
    """Run a line under a display, stopping it on request, and say what came of it."""
    from headrace.line.display import make_display

    result = None
    with (
        make_display(console, _shown(line.run_dir)) as display,
        _logged(console),
        _stops(line, display) as stopped,
        suppress(KeyboardInterrupt),
    ):
        result = line.run(display)
    if result is None or result.interrupted:
        if result is None:
            _say(console, "stopped at once; what came after the last checkpoint is lost")
        else:
            step, steps = len(result.metrics), line.config.line.steps
            _say(console, f"stopped after step {step} of {steps}; a checkpoint is written")
        if line.run_dir.exists():
            _say(console, f"resume with: headrace train --resume {_shown(line.run_dir)}")
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
        ("run folder", _shown(result.run_dir)),
        ("model", _shown(result.run_dir / "final")),
    ]
    for name, value in rows:
        _say(console, f"{name:16} {value}")
    if not any(step["tokens_trained"] for step in result.metrics):
        _say(
            console,
            "nothing was learned: in no step did the samples of a group earn different rewards; make the tasks easier, "
            "or give partial credit",
        )


_EVAL_EXAMPLES = """[bold]Examples[/bold]

  headrace eval examples/addition.toml

  headrace eval runs/addition-001

  headrace eval runs/addition-001 --checkpoint 10"""


@app.command(name="eval", epilog=_EVAL_EXAMPLES)
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml|RUN_DIR", help="A settings file, or a run's folder.")
    ],
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="N", help="The run's checkpoint of step N instead of its final model."),
    ] = None,
) -> None:
    """Measure held-out accuracy with greedy answers, and show some of them."""
    console = Console()
    if not target.is_dir() and checkpoint is None:
        Config.load(target)  # a wrong setting shows before the libraries load
    from headrace.line.display import evaluation_text
    from headrace.line.held_out import candidate

    with _logged(console):
        evaluation = candidate(target, checkpoint).evaluate()
    console.print(_completions(evaluation))
    _say(console, f"held-out accuracy {evaluation_text(evaluation)}")


def _completions(evaluation: Evaluation) -> Table:
    table = Table(caption=f"{min(SHOWN_COMPLETIONS, len(evaluation.tasks))} of {len(evaluation.tasks)} tasks")
    for column in ("prompt", "completion"):
        table.add_column(column, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    for task in evaluation.tasks[:SHOWN_COMPLETIONS]:
        reward = "failed" if task.reward is None else f"{task.reward:.3g}"
        table.add_row(Text(task.prompt), Text(task.completion), reward)
    return table


_GENERATE_EXAMPLES = """[bold]Examples[/bold]

  headrace generate smollm2-135m "What is the capital of France?"

  headrace generate runs/addition-001/final "What is 3 + 4?" --temperature 0

  headrace generate smollm2-135m "Once upon a time" --raw --max-tokens 64"""


@app.command(epilog=_GENERATE_EXAMPLES)
def generate(
    model: Annotated[str, typer.Argument(help="An alias, a folder, a GGUF file or a hub id.")],
    prompt: Annotated[str, typer.Argument(help="One message of the user.")],
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.2,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 256,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
) -> None:
    """Stream one chat completion."""
    from headrace.types import Sampling

    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
    from headrace.engine import Engine

    with _logged(Console(stderr=True)):
        engine = Engine.load(model, max_sequences=1)
    # Without a chat template the text is continued as it is, as in training.
    chat = not raw and bool(engine.tokenizer.chat_template)
    for text in engine.stream([{"role": "user", "content": prompt}] if chat else prompt, sampling):
        print(text, end="", flush=True)
    print()


@app.command(epilog="[bold]Examples[/bold]\n\n  headrace pull smollm2-135m\n\n  headrace pull owner/name")
def pull(model: Annotated[str, typer.Argument(help="An alias, a GGUF file or a hub id.")]) -> None:
    """Fetch a model into the cache, and print its folder."""
    from headrace.models import resolve

    with _logged(Console(stderr=True)):
        path = resolve(model)
    print(path)


@app.command(epilog="[bold]Examples[/bold]\n\n  headrace doctor")
def doctor() -> None:
    """Report device, threads, memory, versions, what is missing and how to mend it."""
    from headrace.doctor import report

    console = Console()
    findings = report()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        _say(console, f"{'ok ' if finding.ok else '!! '} {finding.name:{width}}  {finding.value}")
        if finding.mend:
            _say(console, f"    {'':{width}}  -> {finding.mend}")
    wrong = sum(not finding.ok for finding in findings)
    _say(console, f"\n{wrong} to mend" if wrong else "\nnothing to mend")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _shown(path: Path) -> str:
    """A path as short as it can be typed here."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class _ConsoleLog(logging.Handler):
    """Prints log records as plain lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        _say(self._console, record.getMessage())


@contextmanager
def _logged(console: Console) -> Iterator[None]:
    """Show what headrace logs inside the block (a model that is being fetched, say)."""
    logger, handler = logging.getLogger("headrace"), _ConsoleLog(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


if __name__ == "__main__":
    main()
