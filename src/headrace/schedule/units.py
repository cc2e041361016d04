"""Units of work as data: what a cell is told to do, and what it answers.

Invariants
* A unit and its outcome fit in a message: plain data of at most 1 MB, and handles for what is larger.
* An outcome names the assignment that it answers by (cell, incarnation, number).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.types import Sampling, Trajectory, TrajectoryId

POLICY = "policy"
"""The name of the model that is trained."""


class PolicyVersion(NamedTuple):
    """Which weights of which model: `number` counts its published versions, `weights_id` says what they are."""

    model: str
    number: int
    weights_id: str


class UnitKind(StrEnum):
    """A unit's name in status lines and metrics."""

    DECODE = "decode"
    GRADIENT = "gradient"
    SCORE = "score"
    CONTRIBUTE = "contribute"
    OPTIMIZER_STEP = "optimizer_step"
    PUBLISH = "publish"


class Handle(NamedTuple):
    """Something too large for a message: where it is, what it is, and its size in bytes."""

    name: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """A turn to sample.

    Args:
        id: the trajectory's.
        token_ids: what the policy sees, and what of the turn is sampled already.
        prompt_length: leading tokens that are not of this turn.
        random_key: identifies the randomness of the row; the position does the rest.
        priority: lower is more urgent.
        admitted_version: of its group: no cell with older weights may draw for it (the version fence).
        keep_kv: its KV is worth keeping when the turn ends: another turn will go on from there.
    """

    id: TrajectoryId
    token_ids: tuple[int, ...]
    sampling: Sampling
    prompt_length: int
    random_key: int
    priority: tuple[int, ...]
    admitted_version: int
    keep_kv: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """A few engine steps over everything the cell holds, after it has taken up `requests` and let go of others.

    Args:
        wanted: ids of the requests; the controller adds `requests` themselves when it hands the unit out.
        expected: sessions whose world is about to answer: their tokens, and in how many seconds.
        released: sessions that have ended: their KV may go.
    """

    wanted: tuple[TrajectoryId, ...]
    steps: int
    requests: tuple[Request, ...] = ()
    expected: tuple[tuple[tuple[int, ...], float], ...] = ()
    released: tuple[tuple[int, ...], ...] = ()
    kind: UnitKind = UnitKind.DECODE


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings that a step is taken under, as data: this room does not read them.

    Args:
        algorithm, trainer: the sections of these names (`config.AlgorithmConfig`, `config.TrainerConfig`).
        algorithm_file: the copy of the user's algorithm to execute; None for a built-in one.
        total_steps: of the run, for the learning rate's schedule.
    """

    algorithm: Any
    algorithm_file: str | None
    trainer: Any
    total_steps: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Forward and backward of some committed groups, added to a contribution of the step at exactly `version`.

    Args:
        groups: their ids; the controller adds `members`, the valid trajectories of each.
        contribution: its number; a cell starts a new one from zero. None until the controller has numbered it.
        batch: facts of all B groups by id, if the algorithm's advantages need them.
    """

    groups: tuple[int, ...]
    version: int
    contribution: int | None
    max_staleness: int = 0
    members: tuple[tuple[Trajectory, ...], ...] = ()
    batch: Any = None
    settings: StepSettings | None = None
    kind: UnitKind = UnitKind.GRADIENT


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probs of sampled tokens under the weights of `version`, compared with those they were sampled with."""

    version: int
    tokens: int
    trajectories: tuple[Trajectory, ...] = ()
    kind: UnitKind = UnitKind.SCORE


@dataclass(frozen=True, slots=True)
class Contribute:
    """Hand the contribution on, to where the optimizer is."""

    contribution: int
    kind: UnitKind = UnitKind.CONTRIBUTE


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """New weights from the contributions, summed in this order. The cell does not draw under them before `Publish`."""

    version: int
    contributions: tuple[int, ...]
    handles: tuple[Handle, ...] = ()
    settings: StepSettings | None = None
    kind: UnitKind = UnitKind.OPTIMIZER_STEP


@dataclass(frozen=True, slots=True)
class Publish:
    """Take up a version: from now on the cell draws under it."""

    policy: PolicyVersion
    kind: UnitKind = UnitKind.PUBLISH


Unit = Decode | Gradient | Score | Contribute | OptimizerStep | Publish


class Drawn(NamedTuple):
    """What one sequence drew in a unit; `ids` and `logprobs` have k ≥ 1 entries per engine step that advanced it."""

    id: TrajectoryId
    ids: list[int]
    logprobs: list[float]
    mixed_kv: bool
    finish: str | None


@dataclass(frozen=True, slots=True)
class Decoded:
    """Of a `Decode`: everything was drawn under policy `version`.

    Attributes:
        timed: (sequences, seconds) of each engine step that only decoded.
    """

    version: int
    drawn: tuple[Drawn, ...]
    timed: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GradientDone:
    """Of a `Gradient`: the trainer's account of it (`trainer.GradientResult`)."""

    result: Any
    threads: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Of a `Score`: a `measures.Divergence`."""

    divergence: Any


@dataclass(frozen=True, slots=True)
class Contributed:
    """Of a `Contribute`."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Stepped:
    """Of an `OptimizerStep`: whether weights changed, what they are now, and the step's numbers."""

    updated: bool
    digest: str
    weights_id: str
    loss: float
    grad_norm: float
    learning_rate: float
    threads: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Of a `Publish`: the version that the cell draws under now."""

    number: int


@dataclass(frozen=True, slots=True)
class Died:
    """In place of a result: the incarnation is gone, with all that it was computing; `drawn` tokens never arrived."""

    reason: str
    drawn: int = 0


Result = Decoded | GradientDone | Scored | Contributed | Stepped | Taken | Died


@dataclass(frozen=True, slots=True)
class Assignment:
    """A unit that one incarnation of a cell is told to run. Numbers are never used again."""

    number: int
    cell: str
    incarnation: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an assignment, and the seconds it took."""

    number: int
    cell: str
    incarnation: int
    result: Result
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CellView:
    """What a cell says that it holds, as far as planning needs it.

    Attributes:
        version: the policy version that it draws under.
        optimizer: whether it holds the optimizer's state.
        unfinished: requests that it can advance.
        contribution: the number of its open contribution, if any.
        depth: units it may hold at once: 1, or 2 where answers take a round trip.
        busy: kinds of the units it holds, the running one first.
    """

    name: str
    incarnation: int
    version: int
    optimizer: bool
    unfinished: int
    contribution: int | None
    depth: int = 1
    busy: tuple[UnitKind, ...] = ()
