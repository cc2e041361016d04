"""Run folders made of chosen events, for the tests of what looks at runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.line.run_folder import RunFolder
from headrace.schedule import Bucket
from headrace.state.journal import Journal

Call = Callable[..., Any]
Events = list[tuple[str, dict[str, Any]]]


def settings(**sections: dict[str, Any]) -> Config:
    data: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny-random"},
        "environment": {"name": "arithmetic", "max_attempts": 2},
        "algorithm": {"group_size": 2},
        "line": {"groups_per_step": 1, "steps": 3},
        "eval": {"tasks": 0},
    }
    for section, values in sections.items():
        data[section] = data.get(section, {}) | values
    return Config.from_dict(data)


def start(config: Config, multi_turn: bool = False) -> tuple[str, dict[str, Any]]:
    body = {
        "config": config.to_dict(),
        "version": 0,
        "weights_id": "w0",
        "digest": "d0",
        "resumed": False,
        "multi_turn": multi_turn,
        "threads": 1,
    }
    return "start", body


def admit(group: int, version: int = 0, task: Any = None) -> tuple[str, dict[str, Any]]:
    task = {"prompt": f"what is {group} + {group}?"} if task is None else task
    return "admit", {
        "group": group,
        "task": task,
        "version": version,
        "deadline": version + 1,
        "next_task": group + 1,
        "skipped": 0,
    }


def tokens(version: int, *rows: tuple[str, str, str | None]) -> tuple[str, dict[str, Any]]:
    """Rows of (id, text, finish); the tiny model's tokens are bytes."""
    return "tokens", {
        "version": version,
        "rows": [
            {
                "id": [int(part) for part in name.split(".")],
                "at": 0,
                "ids": list(text.encode()),
                "logprobs": [-0.5] * len(text.encode()),
                "mixed": False,
                "finish": finish,
            }
            for name, text, finish in rows
        ],
    }


def world(name: str, reward: float | None, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"id": [int(part) for part in name.split(".")], "reward": reward, "error": None, "done": True}
    return "world", body | {"observation": None, "info": {}, "snapshot": None, "seconds": 0.1} | more


def step(number: int, *groups: int, reward: float = 0.5, **ledger: int) -> tuple[str, dict[str, Any]]:
    metrics = {
        "step": number,
        "reward_mean": reward,
        "completion_tokens_mean": 4.5,
        "completed_ratio": 1.0,
        "tokens_trained": ledger.get("trained", 0),
        "staleness_mean": 0.0,
        "time_step_s": 1.25,
        "tokens_generated_total": 9 * number,
        **{f"ledger_{bucket}": ledger.get(bucket, 0) for bucket in Bucket},
    }
    return "step", {
        "step": number,
        "groups": list(groups),
        "digest": f"digest{number}",
        "weights_id": f"weights{number}",
        "updated": True,
        "threads": 1,
        "metrics": metrics,
    }


def write(path: Path, config: Config, events: Events, *, logs: bool = True) -> Path:
    """A run folder with these events, and the logs that belong to its steps."""
    with RunFolder.create(path, config) as folder:
        journal = Journal.open(folder.journal_path)
        for kind, body in events:
            journal.record(kind, body)
            journal.commit()
            if kind == "step" and logs:
                folder._append("metrics.jsonl", [body["metrics"]])
        journal.close()
    return path


TWO_GROUPS: Events = [
    start(settings()),
    admit(0),
    tokens(0, ("0.0.0", "4", None), ("0.1.0", "11", "stop")),
    world("0.1.0", None, error="the worker died"),
    tokens(0, ("0.0.0", "2", "stop")),
    world("0.0.0", 1.0),
    tokens(0, ("0.1.1", "fish", "length")),
    world("0.1.1", 0.0),
    ("commit", {"group": 0}),
    admit(1, version=0),
    ("gradient", {"groups": [0], "threads": 1}),
    step(1, 0, trained=6, environment_failed=2),
    tokens(1, ("1.0.0", "abc", None), ("1.1.0", "de", "stop")),
]
