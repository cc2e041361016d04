"""The suite's picture, `results/summary.svg`: every row's ratio as a bar, and its target as a mark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import report
from benchmarks.report import Row

MET, MISSED, TARGET = "#2a9d8f", "#e76f51", "#264653"


def draw(rows: Mapping[str, Row]) -> Path:
    """Write the picture of all rows that have a ratio, from the top down. The same rows give the same file.

    A row without a peer is held against a bound: its ratio is that to the bound, and its target 1.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot

    shown = [row for row in rows.values() if row.ratio is not None]
    ratios = [row.ratio or 0.0 for row in shown]
    targets = [row.target if row.peer is not None else 1.0 for row in shown]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.38 * len(shown)), layout="constrained")
    places = range(len(shown))
    bars = axes.barh(places, ratios, height=0.6, color=[MISSED if r.met is False else MET for r in shown])
    axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], padding=4)
    for place, target in zip(places, targets, strict=True):
        if target is not None:
            axes.plot([target, target], [place - 0.4, place + 0.4], color=TARGET, linewidth=2)
    axes.set_yticks(
        places, [f"{row.what}\nagainst {row.peer_name or 'its bound'}" for row in shown], fontsize=8
    )
    axes.set_xscale("log")
    axes.set_xlabel("how many times better headrace is; the mark is the target")
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    report.RESULTS.mkdir(exist_ok=True)
    path = report.RESULTS / "summary.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
