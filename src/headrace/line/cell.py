"""A cell: one model replica's worth of device, what it holds, and the units of work it can run.

The generator and the trainer of a cell share one set of parameters; publishing a version brings the
generator's packed copies up to date between two engine steps.

Invariants
* One unit runs at a time, so no forward ever sees half-changed weights.
* `version` and `weights_id` change together, and the generator follows at `publish`, before it draws again.
* Every unit's wall time is booked under its name.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from headrace.engine import Engine, TokenEvent
from headrace.schedule import DecodeCost, ThreadShare, Unit
from headrace.schedule.threads import WINDOW_S
from headrace.state.machine import cpu_seconds_of_others
from headrace.state.weights import mint
from headrace.trainer import GradientResult, StepResult, Trainer
from headrace.types import Trajectory

PUBLISH = "publish"
"""Name under which the time of publishing weights is booked."""


class Cell:
    """One in-process cell.

    Attributes:
        version: the policy version of the weights it holds.
        decode_cost: what an engine step costs here, as measured.
        seconds: wall time per unit since `take_seconds` was last called.
    """

    def __init__(self, engine: Engine, trainer: Trainer, decode_steps: int) -> None:
        self.engine = engine
        self.trainer = trainer
        self.decode_steps = decode_steps
        self.version = engine.version
        self.weights_id = engine.weights_id
        self.decode_cost = DecodeCost()
        self.seconds: dict[str, float] = defaultdict(float)
        self._cores_read = -math.inf

    def adapt_threads(self, share: ThreadShare) -> None:
        """Compute with as many threads as other processes leave cores for."""
        now = time.monotonic()
        if now - self._cores_read < WINDOW_S:
            return
        self._cores_read = now
        before = share.threads
        if share.observe(now, cpu_seconds_of_others()) != before:
            torch.set_num_threads(share.threads)

    def decode(self, on_drawn: Callable[[int], None] = lambda drawn: None) -> list[TokenEvent]:
        """A Decode unit: a few engine steps. `on_drawn` is told after each how many tokens the unit has drawn."""
        events: list[TokenEvent] = []
        with self.booked(Unit.DECODE):
            for _ in range(self.decode_steps):
                if not self.engine.num_unfinished:
                    break
                started = time.perf_counter()
                events.extend(self.engine.step())
                on_drawn(len(events))
                if self.engine.last_prefilled == 0:
                    self.decode_cost.add(self.engine.last_decoded, time.perf_counter() - started)
        return events

    def gradient(self, groups: Sequence[Sequence[Trajectory]], max_staleness: int) -> GradientResult:
        """A Gradient unit: forward and backward of some committed groups at the current version."""
        with self.booked(Unit.GRADIENT):
            return self.trainer.accumulate(groups, version=self.version, max_staleness=max_staleness)

    def rescore(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Log-probs of the sampled tokens under the current weights."""
        with self.booked(Unit.GRADIENT):
            return self.trainer.token_logprobs(trajectories)

    def optimizer_step(self) -> StepResult:
        """An OptimizerStep unit: new weights, a new version, published."""
        with self.booked(Unit.OPTIMIZER_STEP):
            result = self.trainer.step()
        self.take_step(result)
        self.publish()
        return result

    def take_step(self, result: StepResult, weights_id: str | None = None) -> None:
        """Count a step that the trainer has made. Its weights are `weights_id`, or new to the world."""
        self.version += 1
        if result.updated:
            self.weights_id = weights_id or mint()

    def publish(self) -> None:
        """Make the trainer's weights the generator's."""
        with self.booked(PUBLISH):
            self.engine.update_weights(self.version, self.weights_id)

    def take_seconds(self) -> dict[str, float]:
        """The time booked since the last call, per unit."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    @contextmanager
    def booked(self, name: str) -> Iterator[None]:
        """Book the block's wall time under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
