"""How the tests call headrace in a process of its own."""

import sys
from collections.abc import Sequence


def command(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *map(str, arguments)]
