"""The errors a user can meet, each one clear line that says what is wrong and how to mend it.

Invariant: a `UserError` is raised before any work starts (exit code 2); a `RunError` ends work that had
started, after its state was saved where that was possible (exit code 1).
"""

from collections.abc import Hashable, Iterable


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose."""


class UserError(HeadraceError):
    """Something the user gave is wrong; nothing was started."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type or impossible."""


class ModelError(UserError):
    """A model is missing, unreadable or of an architecture that headrace refuses."""


class EnvironmentSetupError(UserError):
    """An environment cannot be found or built, or fails on its first task."""


class RunError(HeadraceError):
    """A run that had started cannot go on."""


class EnvironmentFailure(RunError):
    """An environment's worker raised, timed out or died while it served one request."""


class LineStuckError(RunError):
    """A named wait passed its deadline."""


class NonFiniteError(RunError):
    """A loss, gradient or log-probability is not finite. `trajectories` holds the ids of those that caused it."""

    def __init__(self, message: str, trajectories: Iterable[Hashable] = ()) -> None:
        super().__init__(message)
        self.trajectories = tuple(trajectories)


class CheckpointError(RunError):
    """A checkpoint could not be written; the one before it is intact."""
