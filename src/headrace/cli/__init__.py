"""The commands; no logic of their own.

Exit codes
* 0: done. 1: a run that had started cannot go on, or a replay differs. 2: something given is wrong, and nothing
  was started.
* 130 (Ctrl-C) or 143 (SIGTERM): stopped on request; a run can be resumed.

Both errors are one line on standard error. Everything heavy is imported inside the command that needs it.
"""

# The order in which `headrace --help` lists them.
from headrace.cli import train, model, runs, state  # noqa: F401, I001 - importing a module adds its commands
from headrace.cli.app import app, main

__all__ = ["app", "main"]
