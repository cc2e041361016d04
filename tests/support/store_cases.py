"""Stores of weights with names of their own, and processes that read or publish them and can be killed."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from headrace.state.shared_memory import segment_path


def store_name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def remove(name: str) -> None:
    segment_path(name).unlink(missing_ok=True)


class Child:
    """A Python process that runs `code`; what it prints is read line by line."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def child(code: str, *arguments: str) -> Iterator[Child]:
    started = Child(code, *arguments)
    try:
        yield started
    finally:
        started.kill()


def fill(module: nn.Module, value: float) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(value)
