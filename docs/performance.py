"""Keeps `docs/performance.md` true to the measured rows: `.venv/bin/python docs/performance.py [RUN_DIR]`.

Rewrites the page's table from `benchmarks/results/*.json`; with a run's folder it also draws `docs/step_times.svg`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import suite  # noqa: E402
from benchmarks.report import RESULTS, Row  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- table: written by docs/performance.py -->", "<!-- end of table -->"

UNITS = {  # of a step, in the order of the bars, with their keys in metrics.jsonl
    "decode": ("time_decode_s", "#2a9d8f"),
    "gradient": ("time_gradient_s", "#264653"),
    "optimizer": ("time_optimizer_s", "#e9c46a"),
    "publish": ("time_publish_s", "#f4a261"),
    "waiting": ("time_idle_s", "#bbbbbb"),
    "other": ("time_other_s", "#e76f51"),
}


def table() -> str:
    """All measured rows as Markdown, in the order of the suite."""
    lines = [
        "| row | what | headrace | against | ratio | target | share of the limit |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in suite.load():
        path = RESULTS / f"{name}.json"
        if path.is_file():
            lines.append(_line(name, Row.from_json(json.loads(path.read_text(encoding="utf-8")))))
    return "\n".join(lines)


def _line(name: str, row: Row) -> str:
    peer = "" if row.peer is None else f"{row.peer_name}: {_number(row.peer, row.unit)}"
    ratio = "" if row.ratio is None or row.peer is None else f"**{row.ratio:.2f}**"
    target = "" if row.target is None else f"{row.target:g}" + ("" if row.peer else f" {row.unit}")
    verdict = {True: "", False: " (missed)", None: ""}[row.met]
    share = "" if row.share is None else f"{row.share:.0%} of {row.limit_name}"
    ours = _number(row.headrace, row.unit)
    return f"| `{name}` | {row.what} | {ours} | {peer} | {ratio} | {target}{verdict} | {share} |"


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def updated(page: str) -> str:
    """The page with the table as the results are now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def draw_steps(run: Path) -> Path:
    """Stacked bars: what each step of a run spent its seconds on."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot

    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    bottom = [0.0] * len(steps)
    places = [step["step"] for step in steps]
    for name, (key, color) in UNITS.items():
        heights = [step[key] for step in steps]
        axes.bar(places, heights, bottom=bottom, color=color, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_xticks(places)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(UNITS), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    path = PAGE.with_name("step_times.svg")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if len(sys.argv) > 1:
        draw_steps(Path(sys.argv[1]))
