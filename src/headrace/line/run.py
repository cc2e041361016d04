"""One run from its first event, or from where it was, to its end: what stands around the loop.

Invariants
* Every process that takes a run up says so in the journal, with the settings in force, before anything else.
* However it ends, what is recorded is whole, and the next process goes on from there.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from headrace import kernels
from headrace.algorithms import algorithm_file
from headrace.errors import EnvironmentFailure, LineStuckError
from headrace.line import checkpoint
from headrace.line.account import Account
from headrace.line.cell import LocalCell
from headrace.line.episodes import Episodes
from headrace.line.evaluate import evaluate, rollout_sampling
from headrace.line.intake import Intake
from headrace.line.line import ProductionLine
from headrace.line.loading import Loader
from headrace.line.observer import Observer
from headrace.line.record import Record
from headrace.line.resume import Resumed, give_up_contributions, rebase, restore
from headrace.line.rollouts import Rollouts
from headrace.line.setup import Workplace
from headrace.runs.events import (
    SCHEMA,
    EvaluationTaken,
    RunStarted,
    RunStopped,
)
from headrace.runs.folder import RunFolder
from headrace.runs.results import Evaluation, LineResult
from headrace.schedule import ThreadShare
from headrace.schedule.units import POLICY, PolicyVersion, Publish
from headrace.state.machine import core_numbers
from headrace.trainer import Trainer, save_checkpoint


class Run:
    """A run in this process.

    Args:
        stopping: asked between units; true ends the run with a checkpoint.
    """

    def __init__(
        self, workplace: Workplace, folder: RunFolder, observer: Observer, stopping: Callable[[], bool]
    ) -> None:
        self.workplace, self.folder, self.observer, self.stopping = workplace, folder, observer, stopping
        self.config, self.model = workplace.config, workplace.model
        self.record = Record(None)
        self.account = Account(self.record.state, folder, observer)
        self.cell = self._make_cell()

    def run(self, resume: bool) -> LineResult:
        model = self.config.model
        if model.device == "cpu" and model.dtype == "float32" and (reason := kernels.unavailable_reason()):
            self.observer.on_message(f"generation runs on PyTorch's operators, more slowly: {reason}")
        journal = self.record.journal = checkpoint.open_journal(self.folder, self.observer.on_message)
        try:
            return self._run(resume)
        finally:
            (self.record.journal or journal).close()

    def _run(self, resume: bool) -> LineResult:
        state = self.record.state
        resumed = Resumed([], True)
        if resume:
            resumed = restore(
                self.record, self.config, self.cell, self.model.module, self.folder, self.account
            )
        fresh = state.admission is None
        # In the frame of the start, and before it: who reads the journal knows from there which version starts.
        rebased = not fresh and rebase(self.record, self.cell, resumed, self.observer.on_message)
        self._begin(resume)
        if not fresh:
            give_up_contributions(self.record, self.cell.name, self.cell.incarnation)
        if rebased:
            self._save()
        self.cell.run(Publish(state.policy))
        result = LineResult(self.folder.path, self.account.metrics)
        if resume:
            result.before = self.folder.evaluation("before")
        # Weights that were trained already cannot tell what came before.
        if result.before is None and not state.version and self.config.eval.tasks and not self.stopping():
            result.before = self._evaluate("before")
        line = self._make_line()
        self.record.commit()
        line.rollouts.take_up()
        # What a resume or an evaluation took belongs to no step.
        self.account.start_clock(line.cells)
        try:
            if not line.run():
                self.record.emit(RunStopped("asked to"))
                self._save()
                result.interrupted = True
                return result
        except (EnvironmentFailure, LineStuckError) as error:
            # The environment is broken, not the line: what it holds is worth keeping.
            self._save()
            raise type(error)(f"{error}; mend it, then continue with --resume {self.folder.path}") from error
        self._save()
        save_checkpoint(self.folder.final_path, self.model.module, self.model.path)
        if self.config.eval.tasks:
            result.after = self._evaluate("after")
            self.record.commit()
        return result

    # Inside

    def _make_cell(self) -> LocalCell:
        config, module = self.config, self.model.module
        algorithm = self.workplace.algorithm
        reference = copy.deepcopy(module) if algorithm.settings.kl_coef > 0 else None
        trainer = Trainer(module, algorithm, config.trainer, config.line.steps, reference)
        # A number of threads that the settings give is kept; otherwise it follows what the machine has left.
        share = None if config.line.threads else ThreadShare(len(core_numbers()), torch.get_num_threads())
        engine = self.workplace.engine
        policy = PolicyVersion(POLICY, 0, engine.weights_id)

        def note(drawn: int) -> None:
            # Counted before it is known to anyone: what a crash takes is `lost`.
            self.folder.note_generated(self.record.state.ledger.generated + drawn)

        return LocalCell(policy, engine, trainer, on_drawn=note, share=share, report=self.observer.on_message)

    def _begin(self, resumed: bool) -> None:
        state = self.record.state
        policy = self.cell.policy if state.admission is None else state.policy
        self.record.emit(
            RunStarted(
                SCHEMA,
                self.config.to_dict(),
                policy.number,
                policy.weights_id,
                self.cell.digest(),
                resumed,
                self.workplace.pool.multi_turn,
                torch.get_num_threads(),
                kernels.kernel_fingerprint(),
                self._keep_algorithm(),
            )
        )
        self.record.commit()
        if state.settings_wait:
            self.observer.on_message(
                f"step {state.version + 1} has gradients already and is completed under the settings they were taken "
                f"with; the edited ones hold from step {state.version + 2} on"
            )

    def _keep_algorithm(self) -> str | None:
        """A copy of the user's algorithm in the run's folder: steps that are taken again execute it."""
        file = algorithm_file(self.config.algorithm)
        if file is None:
            return None
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        kept = self.folder.path / "algorithms" / f"{file.stem}-{digest}{file.suffix}"
        kept.parent.mkdir(exist_ok=True)
        if not kept.exists():
            shutil.copyfile(file, kept)
        return str(Path("algorithms") / kept.name)

    def _make_line(self) -> ProductionLine:
        state, config, pool = self.record.state, self.config, self.workplace.pool
        context = self.workplace.engine.context_length
        episodes = Episodes(
            state, self.model, context, rollout_sampling(config), config.environment.max_attempts
        )
        rollouts = Rollouts(self.record, episodes, pool, self.observer.on_message)
        self.record.listeners.append(self.account.on_event)
        return ProductionLine(
            self.record,
            {self.cell.name: self.cell},
            rollouts,
            Intake(self.model, context, pool, self.observer.on_message),
            Loader(state, self.folder.path),
            self.account,
            pool,
            self.observer,
            self._save,
            self.stopping,
        )

    def _save(self) -> None:
        checkpoint.save(self.record, self.cell, self.model, self.folder, self.account)

    def _evaluate(self, name: str) -> Evaluation:
        """Measure held-out reward and keep the answers in the run folder."""
        evaluation = evaluate(self.workplace, self.record.state.version)
        self.folder.write_evaluation(name, evaluation)
        reward = evaluation.reward if evaluation.reward == evaluation.reward else None
        self.record.emit(
            EvaluationTaken(name, evaluation.step, reward, evaluation.failed, evaluation.skipped)
        )
        self.observer.on_evaluation(name, evaluation)
        return evaluation
