"""headrace: reinforcement learning of language models as one production line.

Invariant: importing this package imports no torch; every public name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.engine import Engine, Output, Sample
    from headrace.environments import Environment
    from headrace.errors import HeadraceError, RunError, UserError
    from headrace.line.handle import Line
    from headrace.line.observer import LineStatus, Observer
    from headrace.runs.results import Evaluation, LineResult
    from headrace.types import Group, Sampling, Trajectory, TrajectoryId

__version__ = "0.1.0"

_HOMES = {
    "Config": "headrace.config",
    "Engine": "headrace.engine",
    "Environment": "headrace.environments",
    "Evaluation": "headrace.runs.results",
    "Group": "headrace.types",
    "HeadraceError": "headrace.errors",
    "Line": "headrace.line.handle",
    "LineResult": "headrace.runs.results",
    "LineStatus": "headrace.line.observer",
    "Observer": "headrace.line.observer",
    "Output": "headrace.engine",
    "RunError": "headrace.errors",
    "Sample": "headrace.engine",
    "Sampling": "headrace.types",
    "Trajectory": "headrace.types",
    "TrajectoryId": "headrace.types",
    "UserError": "headrace.errors",
}

__all__ = [
    "Config",
    "Engine",
    "Environment",
    "Evaluation",
    "Group",
    "HeadraceError",
    "Line",
    "LineResult",
    "LineStatus",
    "Observer",
    "Output",
    "RunError",
    "Sample",
    "Sampling",
    "Trajectory",
    "TrajectoryId",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
