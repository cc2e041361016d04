"""Cells: one model replica's worth of device each, what it holds, and the units of work that it runs.

`Cell` is what the line knows of one; it is made for cells that answer late. `LocalCell` is the one in this process:
its generator and its trainer share one set of parameters, and publishing a version brings the generator's packed copies
up to date between two engine steps.

Invariants
* One unit runs at a time, so no forward ever sees half-changed weights.
* A cell draws nothing for a request whose group was admitted at a version newer than its own.
* New weights are drawn under after `Publish` only, which the line sends once the step is on record.
* Nobody outside this module touches the engine or the trainer of a running line.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from headrace.algorithms import load_algorithm
from headrace.engine import Engine, TokenEvent
from headrace.schedule import ThreadShare
from headrace.schedule.threads import WINDOW_S
from headrace.schedule.units import (
    Assignment,
    CellView,
    Contribute,
    Contributed,
    Decode,
    Decoded,
    Drawn,
    Gradient,
    GradientDone,
    Handle,
    OptimizerStep,
    Outcome,
    PolicyVersion,
    Publish,
    Result,
    Score,
    Scored,
    Stepped,
    StepSettings,
    Taken,
)
from headrace.state.machine import cpu_seconds_of_others
from headrace.state.weights import mint
from headrace.trainer import Exported, Trainer, divergence_of
from headrace.types import Trajectory


class Cell(Protocol):
    """A place where units run.

    A cell that dies comes back, if at all, under a higher incarnation, with nothing of what it was computing.
    """

    @property
    def view(self) -> CellView:
        """What it holds; `busy` and `unfinished` are the line's to say."""

    def start(self, assignment: Assignment) -> None:
        """Begin a unit, or queue it behind the one that runs."""

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Outcomes that have come in, after waiting for the first one for at most so long."""

    def counters(self) -> dict[str, int]:
        """The generator's totals since its start, by name."""


class LocalCell:
    """The cell of this process. Units run when they are waited for.

    Args:
        policy: the version that the weights are.
        trainer: None for a cell that only generates.
        engine: None for a cell that only trains.
        on_drawn: told after each engine step how many tokens the unit under way has drawn.
        share: decides the number of threads beside other processes; None keeps it.
        report: told once that other processes use the cores.
    """

    def __init__(
        self,
        policy: PolicyVersion,
        engine: Engine | None,
        trainer: Trainer | None,
        *,
        name: str = "cell-0",
        on_drawn: Callable[[int], None] = lambda drawn: None,
        share: ThreadShare | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = name
        self.incarnation = 0
        self.policy = policy
        self.on_drawn = on_drawn
        self.share = share
        self.report = report
        self._told_of_neighbours = False
        self._engine = engine
        self._trainer = trainer
        self._units: deque[Assignment] = deque()
        self._settings: StepSettings | None = None
        self._contribution: int | None = None
        self._resident: int | None = None
        self._exported: dict[int, Exported] = {}
        self._cores_read = -math.inf

    @property
    def view(self) -> CellView:
        return CellView(
            self.name,
            self.incarnation,
            self.policy.number,
            self._trainer is not None,
            0 if self._engine is None else self._engine.num_unfinished,
            self._contribution,
        )

    def start(self, assignment: Assignment) -> None:
        self._units.append(assignment)

    def wait(self, timeout_s: float) -> list[Outcome]:
        """The outcome of the next unit, which runs now; nothing if there is none."""
        if not self._units:
            return []
        assignment = self._units.popleft()
        if self.share is not None:
            self._adapt_threads(self.share)
        started = time.perf_counter()
        result = self._run(assignment.unit)
        seconds = time.perf_counter() - started
        return [Outcome(assignment.number, self.name, self.incarnation, result, seconds)]

    def run(self, unit: Any, threads: int | None = None) -> Any:
        """Run a unit at once, outside the line's turn, on so many threads: a recorded one once more, say."""
        before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            return self._run(unit)
        finally:
            torch.set_num_threads(before)

    def counters(self) -> dict[str, int]:
        """The generator's totals since its start: preemptions, and prompt tokens found in each tier."""
        if self._engine is None:
            return {}
        directory = self._engine.directory
        hits = {tier.name: tier.counters.hits * directory.cache.block_size for tier in directory.tiers}
        return {
            "preemptions": self._engine.scheduler.preemptions,
            "prefix_hit_tokens": self._engine.cache.hit_tokens,
            "kv_host_hit_tokens": hits.get("host", 0),
            "kv_disk_hit_tokens": hits.get("disk", 0),
        }

    def digest(self) -> str:
        """What the weights are, bit for bit."""
        assert self._trainer is not None
        return self._trainer.digest()

    def trainer_state(self) -> dict[str, Any]:
        """The optimizer's state, for a checkpoint."""
        assert self._trainer is not None
        return self._trainer.state_dict()

    def load(self, read: Callable[[Trainer], Any]) -> Any:
        """Let `read` put a checkpoint's weights and optimizer state in; what was accumulated is gone."""
        assert self._trainer is not None
        self._contribution = self._resident = None
        self._exported.clear()
        return read(self._trainer)

    # Units

    def _run(self, unit: Any) -> Result:
        match unit:
            case Decode():
                return self._decode(unit)
            case Gradient():
                return self._gradient(unit)
            case Score():
                return self._score(unit)
            case Contribute():
                return self._contribute(unit)
            case OptimizerStep():
                return self._step(unit)
            case Publish():
                return self._publish(unit)
        raise TypeError(f"no unit of work: {unit!r}")

    def _decode(self, unit: Decode) -> Decoded:
        engine = self._engine
        assert engine is not None
        for tokens in unit.released:
            engine.release(tokens)
        for tokens, seconds in unit.expected:
            engine.expect(tokens, seconds)
        for request in unit.requests:
            if request.admitted_version > self.policy.number:
                raise RuntimeError(
                    f"trajectory {request.id} was admitted at version {request.admitted_version}, and this cell holds "
                    f"version {self.policy.number}"
                )
            engine.submit(
                request.id,
                request.token_ids,
                request.sampling,
                random_key=request.random_key,
                prompt_length=request.prompt_length,
                priority=request.priority,
                keep_kv=request.keep_kv,
            )
        drawn: dict[Any, Drawn] = {}
        timed: list[tuple[int, float]] = []
        count = 0
        for _ in range(unit.steps):
            if not engine.num_unfinished:
                break
            started = time.perf_counter()
            events = engine.step()
            count += len(events)
            self.on_drawn(count)
            if engine.last_prefilled == 0:
                timed.append((engine.last_decoded, time.perf_counter() - started))
            for event in events:
                drawn[event.request_id] = _with(drawn.get(event.request_id), event)
        return Decoded(self.policy.number, tuple(drawn.values()), tuple(timed))

    def _gradient(self, unit: Gradient) -> GradientDone:
        trainer = self._trainer
        assert trainer is not None
        if unit.version != self.policy.number:
            raise RuntimeError(
                f"a gradient of version {unit.version} on weights of version {self.policy.number}"
            )
        if self._resident != unit.contribution:
            self._export()
            self._contribution = self._resident = unit.contribution
        self._configure(unit.settings)
        result = trainer.accumulate(
            unit.members, version=unit.version, max_staleness=unit.max_staleness, batch=unit.batch
        )
        return GradientDone(result, torch.get_num_threads())

    def _configure(self, settings: StepSettings | None) -> None:
        """Go on under the settings of the step."""
        if settings is None or settings == self._settings:
            return
        assert self._trainer is not None
        file = None if settings.algorithm_file is None else Path(settings.algorithm_file)
        algorithm = load_algorithm(settings.algorithm, file)
        self._trainer.configure(algorithm, settings.trainer, settings.total_steps)
        self._settings = settings

    def _export(self) -> None:
        """Make room for another contribution's sum."""
        assert self._trainer is not None
        if self._resident is not None:
            self._exported[self._resident] = self._trainer.export()
            self._resident = None

    def _score(self, unit: Score) -> Scored:
        assert self._trainer is not None
        logprobs = self._trainer.token_logprobs(unit.trajectories)
        return Scored(divergence_of(*_fresh(unit.trajectories, logprobs, unit.version)))

    def _contribute(self, unit: Contribute) -> Contributed:
        """The optimizer is here, so the sum stays where it is."""
        self._contribution = None
        return Contributed(Handle(f"{self.name}/{unit.contribution}", "", 0))

    def _step(self, unit: OptimizerStep) -> Stepped:
        trainer = self._trainer
        assert trainer is not None
        self._configure(unit.settings)
        parts = None
        if unit.contributions not in ((), (self._resident,)):
            self._export()
            parts = [self._exported[number] for number in unit.contributions]
        step = trainer.step(parts)
        self._resident = self._contribution = None
        self._exported.clear()
        weights_id = mint() if step.updated else self.policy.weights_id
        return Stepped(
            step.updated,
            trainer.digest(),
            weights_id,
            step.loss,
            step.grad_norm,
            step.learning_rate,
            torch.get_num_threads(),
        )

    def _publish(self, unit: Publish) -> Taken:
        self.policy = unit.policy
        if self._engine is not None:
            self._engine.update_weights(unit.policy.number, unit.policy.weights_id)
        return Taken(unit.policy.number)

    def _adapt_threads(self, share: ThreadShare) -> None:
        """Compute with as many threads as other processes leave cores for."""
        now = time.monotonic()
        if now - self._cores_read < WINDOW_S:
            return
        self._cores_read = now
        before = share.threads
        if share.observe(now, cpu_seconds_of_others()) != before:
            torch.set_num_threads(share.threads)
        if share.threads < before and not self._told_of_neighbours:
            self._told_of_neighbours = True
            self.report(
                f"other processes use the cores: computing with {share.threads} of {share.most} threads as long as "
                "they do (`threads` in metrics.jsonl says it for every step)"
            )


def _with(before: Drawn | None, event: TokenEvent) -> Drawn:
    """A sequence's tokens of the unit, with one more."""
    if before is None:
        return Drawn(
            event.request_id,  # type: ignore[arg-type]
            [event.token_id],
            [event.logprob],
            event.mixed_kv,
            event.finish_reason,
        )
    before.ids.append(event.token_id)
    before.logprobs.append(event.logprob)
    return before._replace(mixed_kv=before.mixed_kv or event.mixed_kv, finish=event.finish_reason)


def _fresh(
    trajectories: tuple[Trajectory, ...], logprobs: list[list[float]], version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs now and when they were sampled, of the tokens that `version` sampled; both [T], float64."""
    now: list[float] = []
    then: list[float] = []
    for trajectory, scored in zip(trajectories, logprobs, strict=True):
        places = [i for i, sampled in enumerate(trajectory.sampled) if sampled]
        for place, logprob in zip(places, scored, strict=True):
            if trajectory.versions[place] == version:
                now.append(logprob)
                then.append(trajectory.logprobs[place])
    return torch.tensor(now, dtype=torch.float64), torch.tensor(then, dtype=torch.float64)
