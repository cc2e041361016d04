"""Draws `docs/run.svg` from a run's own metrics: `.venv/bin/python docs/picture.py runs/addition-001`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from headrace.line.account import token_rates
from headrace.line.display import LiveDisplay, evaluation_text
from headrace.line.observer import LineStatus
from headrace.runs.folder import RunFolder

SHOWN_STEPS = 12


def picture(run_dir: Path) -> str:
    """The live display as it stood in the middle of the run, as SVG."""
    with RunFolder.open(run_dir, read_only=True) as folder:
        metrics, steps = folder.metrics(), folder.config.line.steps
        before = folder.evaluation("before")
        groups = folder.config.line.groups_per_step
    shown = metrics[:SHOWN_STEPS]
    last = shown[-1]
    decode, train = token_rates(last)
    recent = sorted(m["time_step_s"] for m in shown[-5:])
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print("$ headrace train examples/addition.toml", highlight=False)
    if before is not None:
        console.print(f"held-out reward before training: {evaluation_text(before)}", highlight=False)
    display = LiveDisplay(console, "runs/addition-001")
    display.on_status(
        LineStatus(
            step=len(shown),
            steps=steps,
            doing="decode",
            reward_history=tuple(m["reward_mean"] for m in shown),
            decode_tokens_per_s=decode,
            train_tokens_per_s=train,
            staleness_mean=last["staleness_mean"],
            decoding=groups * folder.config.algorithm.group_size,
            at_environment=0,
            ready=0,
            committed=0,
            groups_per_step=groups,
            seconds_left=recent[len(recent) // 2] * (steps - len(shown)),
        )
    )
    console.print(display.render())
    # Rich links fonts from elsewhere; the reader's own monospace will do.
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="headrace"), flags=re.DOTALL)


if __name__ == "__main__":
    Path(__file__).with_name("run.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
