"""A worker's side of `peers.Worker`: settings in, facts out, then one answer per request. Standard library only.

Import it before anything else: it takes standard input and output for itself, so that what a library prints goes
to standard error and cannot be taken for an answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

_requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)


def settings() -> dict[str, Any]:
    """What the worker was started with."""
    return dict(json.loads(_requests.readline()))


def serve(ready: dict[str, Any], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Say that the worker is ready, with facts about it, and answer until no more requests can come."""
    _send(ready)
    for line in _requests:
        _send(answer(json.loads(line)))


def _send(content: dict[str, Any]) -> None:
    print(json.dumps(content), file=_answers, flush=True)
