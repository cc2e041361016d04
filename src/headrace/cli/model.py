"""`headrace eval`, `generate`, `pull` and `doctor`: what can be asked without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.app import app
from headrace.cli.console import logged, say
from headrace.config import Config

if TYPE_CHECKING:
    from headrace.runs.results import Evaluation

SHOWN_COMPLETIONS = 10
"""Rows of the table that `headrace eval` prints."""

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
    """Measure held-out reward with greedy answers, and show some of them."""
    console = Console()
    if not target.is_dir() and checkpoint is None:
        Config.load(target)  # a wrong setting shows before the libraries load
    from headrace.line.display import evaluation_text
    from headrace.line.held_out import candidate

    with logged(console):
        evaluation = candidate(target, checkpoint).evaluate()
    console.print(_completions(evaluation))
    say(console, f"held-out reward {evaluation_text(evaluation)}")


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

    with logged(Console(stderr=True)):
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

    with logged(Console(stderr=True)):
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
        say(console, f"{'ok ' if finding.ok else '!! '} {finding.name:{width}}  {finding.value}")
        if finding.mend:
            say(console, f"    {'':{width}}  -> {finding.mend}")
    wrong = sum(not finding.ok for finding in findings)
    say(console, f"\n{wrong} to mend" if wrong else "\nnothing to mend")
