"""The loop of a running line and the state it holds.

One thread: before each unit of work it admits what may start, takes what the environments answered, commits
what is ready, and asks `schedule` which unit comes next.

Invariants
* No token is trained above `line.max_staleness` (`schedule/admission.py`), also after a resume.
* A group is consumed once, by one step; the ledger balances after every step.
* Every wait has a name and a deadline; a line that nothing can move any more ends with an error at once.
* A checkpoint holds all of the line's state: a resume goes on with the same tasks, counters and trajectories.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.errors import EnvironmentFailure, LineStuckError, NonFiniteError, RunError, UserError
from headrace.line.agreement import Agreement
from headrace.line.cell import Cell
from headrace.line.episodes import Episodes
from headrace.line.evaluate import evaluate
from headrace.line.metrics import step_metrics
from headrace.line.observer import Evaluation, LineResult, LineStatus, Observer
from headrace.line.run_folder import RunFolder
from headrace.line.setup import Workplace, check_prompt
from headrace.schedule import (
    Admission,
    Bucket,
    Ledger,
    LineState,
    ThreadShare,
    Unit,
    next_unit,
    worth_starting,
)
from headrace.state.machine import core_numbers
from headrace.trainer import TokenStatistics, Trainer, load_checkpoint, save_checkpoint
from headrace.types import Group, Trajectory

REPORT_WAIT_S = 10.0
"""A wait says what it waits for this often."""

PROMPT_ANSWER_S = 0.05
"""An environment that answers within this is waited for rather than run ahead of: that would only cost staleness."""

REPLACED_LIMIT = 10
"""With `zero_advantage = "replace"`, at most this many times B groups are replaced in one step; further ones count."""

SKIPPED_LIMIT = 100
"""Tasks in a row whose prompts do not fit before the run ends."""


class Production:
    """A line that runs.

    Args:
        stopping: asked between units; true ends the run with a checkpoint.
    """

    def __init__(
        self, workplace: Workplace, folder: RunFolder, observer: Observer, stopping: Callable[[], bool]
    ) -> None:
        config = workplace.config
        self.config, self.folder, self.observer, self.stopping = config, folder, observer, stopping
        self.engine, self.pool = workplace.engine, workplace.pool
        self.model = workplace.model
        reference = copy.deepcopy(self.model.module) if config.algorithm.kl_coef > 0 else None
        trainer = Trainer(self.model.module, config.algorithm, config.trainer, config.line.steps, reference)
        self.cell = Cell(self.engine, trainer, config.line.decode_steps)
        # A number of threads that the settings give is kept; otherwise it follows what the machine has left.
        share = ThreadShare(len(core_numbers()), torch.get_num_threads())
        self.threads = None if config.line.threads else share
        self.admission = Admission(config.line.steps, config.line.groups_per_step, config.line.max_staleness)
        self.ledger = Ledger()
        self.episodes = Episodes(config, self.engine, self.pool, self.ledger, observer.on_message)
        self.next_group = 0
        self.next_task = 0
        self.skipped = 0
        self.failed_groups = 0
        self.failed_in_a_row = 0
        self.replaced = 0
        self.metrics: list[dict[str, Any]] = []
        self._pending: list[int] = []
        self.agreement = Agreement(config.line.logprob_diff_limit)
        self._ledger_before = self.ledger.to_dict()
        self._counters_before = self._counters()
        self._step_started = time.perf_counter()
        self._elapsed_before = 0.0
        self._rates = (0.0, 0.0)

    def run(self, resume: bool) -> LineResult:
        restored = self._restore() if resume else None
        result = LineResult(self.folder.path, self.metrics)
        if resume:
            result.before = self.folder.evaluation("before")
        # Weights that were trained already cannot tell what came before.
        if result.before is None and restored is None and self.config.eval.tasks and not self.stopping():
            result.before = self._evaluate("before")
        self._step_started = time.perf_counter()
        try:
            while not self.admission.finished:
                if self.stopping():
                    self._checkpoint()
                    result.interrupted = True
                    return result
                self._advance()
        except (EnvironmentFailure, LineStuckError) as error:
            # The environment is broken, not the line: what it holds is worth keeping.
            self._checkpoint()
            raise type(error)(f"{error}; mend it, then continue with --resume {self.folder.path}") from error
        self._checkpoint()
        save_checkpoint(self.folder.final_path, self.model.module, self.model.path)
        if self.config.eval.tasks:
            result.after = self._evaluate("after")
        return result

    def _advance(self) -> None:
        """Everything between two units of work, and one unit."""
        self._take_replies()
        self._settle_finished()
        self._admit()
        state = self._state()
        unit = next_unit(state)
        if self.threads is not None:
            self.cell.adapt_threads(self.threads)
        self.observer.on_status(self._status(unit))
        try:
            match unit:
                case Unit.DECODE:
                    for event in self.cell.decode():
                        self.episodes.on_token(event)
                    self.folder.note_generated(self.ledger.generated)
                case Unit.GRADIENT:
                    self._gradient()
                case Unit.OPTIMIZER_STEP:
                    self._step()
                case Unit.WAIT:
                    self._wait(state)
        except NonFiniteError as error:
            offenders = [self._trajectory(key) for key in error.trajectories]
            path = self.folder.save_offenders(
                self.admission.version + 1, [t for t in offenders if t is not None], str(error)
            )
            raise NonFiniteError(f"{error}; the trajectories that caused it are in {path}") from error

    def _take_replies(self) -> None:
        """Take what the environments have answered; an idle engine waits a moment for what is about to come."""
        for reply in self.pool.poll():
            self.episodes.on_reply(reply)
        while self.episodes.at_environment and not self.engine.num_unfinished and not self._pending:
            with self.cell.booked(Unit.WAIT):
                replies = self.pool.wait(PROMPT_ANSWER_S)
            if not replies:
                return
            for reply in replies:
                self.episodes.on_reply(reply)

    def _admit(self) -> None:
        """Start groups while the bound allows it and the line gains by it."""
        skipped = 0
        while self.admission.can_admit() and self._worth_starting():
            task = self.pool.train_task(self.next_task)
            self.next_task += 1
            try:
                prompt_ids = check_prompt(self.engine, task)
            except UserError as error:
                self.skipped += 1
                skipped += 1
                self.observer.on_message(f"task {self.next_task - 1} is skipped: {error}")
                if skipped == SKIPPED_LIMIT:
                    raise RunError(f"{skipped} tasks in a row do not fit the context: {error}") from None
                continue
            skipped = 0
            group = Group(self.next_group, task, prompt_ids, self.admission.version)
            self.next_group += 1
            self.episodes.start(group, self.admission.admit(group.id))

    def _worth_starting(self) -> bool:
        committed = len(self.admission.committed)
        return worth_starting(
            groups_per_step=self.config.line.groups_per_step,
            committed=committed,
            uncommitted=len(self.admission.outstanding) - committed,
            decodable=self.engine.num_unfinished,
            cost=self.cell.decode_cost,
        )

    def _settle_finished(self) -> None:
        """Close groups that cannot be used, commit those that can as far as the deadlines allow."""
        ready = []
        for group_id in list(self.episodes.groups):
            if group_id in self.admission.committed or not self.episodes.finished(group_id):
                continue
            if not self.episodes.usable(group_id):
                self._close_failed(group_id)
            elif self._replaceable(group_id):
                self.replaced += 1
                self._close(group_id, Bucket.ZERO_ADVANTAGE)
            else:
                self.failed_in_a_row = 0
                ready.append(group_id)
        while (group_id := self.admission.next_commit(ready)) is not None:
            self.admission.commit(group_id)
            self._pending.append(group_id)

    def _replaceable(self, group_id: int) -> bool:
        if self.config.algorithm.zero_advantage != "replace":
            return False
        replaced = self.replaced - self._counters_before["groups_replaced"]
        rewards = self.episodes.groups[group_id].rewards
        return len(set(rewards)) == 1 and replaced < REPLACED_LIMIT * self.config.line.groups_per_step

    def _close_failed(self, group_id: int) -> None:
        self._close(group_id, Bucket.ENVIRONMENT_FAILED)
        self.failed_groups += 1
        self.failed_in_a_row += 1
        limit = 2 * self.config.line.groups_per_step
        self.observer.on_message(
            f"group {group_id} is closed: the environment failed too many of its samples"
        )
        if self.failed_in_a_row >= limit:
            raise EnvironmentFailure(
                f"the environment failed {limit} groups in a row; the last failure: {self.episodes.last_failure}"
            )

    def _close(self, group_id: int, bucket: Bucket) -> None:
        self.admission.close(group_id)
        group = self.episodes.remove(group_id)
        self.ledger.settle(bucket, sum(t.num_sampled for t in group.trajectories))

    def _state(self) -> LineState:
        return LineState(
            groups_per_step=self.config.line.groups_per_step,
            committed=len(self.admission.committed),
            pending_gradient_groups=len(self._pending),
            pending_gradient_tokens=sum(map(self._packed_tokens, self._pending)),
            micro_batch_tokens=self.config.trainer.micro_batch_tokens,
            decodable=self.engine.num_unfinished,
            waiting_on_environment=len(self.episodes.at_environment),
        )

    def _packed_tokens(self, group_id: int) -> int:
        group = self.episodes.groups[group_id]
        prompt = len(group.prompt_ids)
        return prompt + sum(len(t.token_ids) - prompt for t in group.trajectories)

    def _gradient(self) -> None:
        """Take the gradient of the oldest committed groups, about one micro-batch of them."""
        taken, tokens = 0, 0
        for group_id in self._pending:
            size = self._packed_tokens(group_id)
            if taken and tokens + size > self.config.trainer.micro_batch_tokens:
                break
            taken, tokens = taken + 1, tokens + size
        groups = [self.episodes.groups[group_id].trajectories for group_id in self._pending[:taken]]
        result = self.cell.gradient(groups, self.config.line.max_staleness)
        self.agreement.statistics.merge(result.statistics)
        del self._pending[:taken]

    def _step(self) -> None:
        """Update the weights, publish them, settle the consumed groups, and log the step."""
        self.agreement.check(self.cell, self.episodes, set(self.admission.committed))
        result = self.cell.optimizer_step()
        groups = [self.episodes.remove(group_id) for group_id in self.admission.complete_step()]
        gradient = result.gradient
        self.ledger.settle(Bucket.TRAINED, gradient.tokens_trained)
        self.ledger.settle(Bucket.ZERO_ADVANTAGE, gradient.tokens_zero_advantage)
        self.ledger.settle(Bucket.MASKED, gradient.tokens_masked)
        self.ledger.check(self.episodes.tokens_in_flight())
        step = self.admission.version
        books, counters = self.ledger.to_dict(), self._counters()
        seconds = self.cell.take_seconds()
        now = time.perf_counter()
        metrics = step_metrics(
            step=step,
            groups=groups,
            result=result,
            probe=self.agreement.statistics,
            seconds=seconds,
            time_step_s=now - self._step_started + self._elapsed_before,
            settled={bucket: books[bucket] - self._ledger_before[bucket] for bucket in Bucket},
            tokens_generated=books["generated"] - self._ledger_before["generated"],
            tokens_generated_total=books["generated"],
            counters={name: counters[name] - self._counters_before[name] for name in counters}
            | {"threads": torch.get_num_threads()},
        )
        self._step_started, self._elapsed_before = now, 0.0
        self.agreement.statistics = TokenStatistics()
        self._ledger_before, self._counters_before = books, counters
        self._rates = token_rates(metrics)
        self.folder.append_trajectories(step, groups)
        self.folder.append_metrics(metrics)
        self.metrics.append(metrics)
        self.observer.on_step(metrics)
        if not result.updated:
            self.observer.on_message(
                f"step {step} taught nothing: within each group all rewards were equal. Now and then that is fine; "
                "if it goes on, the tasks are too easy or too hard, or the reward needs partial credit"
            )
        every = self.config.line.checkpoint_every
        if every and step % every == 0 and not self.admission.finished:
            self._checkpoint()

    def _wait(self, state: LineState) -> None:
        """Wait for an environment, by name and with a deadline."""
        waited_for = self.admission.waited_for()
        what = (
            f"the rewards of {state.waiting_on_environment} trajectories (groups {waited_for} are due first)"
        )
        if state.stalled:
            raise LineStuckError(
                f"the line is stuck: nothing runs, and nothing is asked that could bring {what}"
            )
        limit = self.config.line.wait_timeout_s
        with self.cell.booked(Unit.WAIT):
            started = time.monotonic()
            while True:
                waited = time.monotonic() - started
                replies = self.pool.wait(min(REPORT_WAIT_S, max(0.0, limit - waited)))
                for reply in replies:
                    self.episodes.on_reply(reply)
                if replies or self.stopping():
                    return
                waited = time.monotonic() - started
                if waited >= limit:
                    raise LineStuckError(f"waited {waited:.0f} s (line.wait_timeout_s) for {what}")
                self.observer.on_message(f"waiting on {what} for {waited:.0f} s of at most {limit:.0f}")

    def _evaluate(self, name: str) -> Evaluation:
        """Measure held-out accuracy and keep the answers in the run folder."""
        evaluation = evaluate(self.config, self.engine, self.pool, self.admission.version)
        self.folder.write_evaluation(name, evaluation)
        self.observer.on_evaluation(name, evaluation)
        return evaluation

    def _status(self, unit: Unit) -> LineStatus:
        recent = [m["time_step_s"] for m in self.metrics[-5:]]
        left = self.config.line.steps - self.admission.version
        waiting = len(self.episodes.at_environment)
        return LineStatus(
            step=self.admission.version,
            steps=self.config.line.steps,
            doing=f"waiting on {waiting} rewards" if unit is Unit.WAIT else unit.value,
            reward_history=tuple(m["reward_mean"] for m in self.metrics),
            decode_tokens_per_s=self._rates[0],
            train_tokens_per_s=self._rates[1],
            staleness_mean=self.metrics[-1]["staleness_mean"] if self.metrics else 0.0,
            decoding=self.engine.num_unfinished,
            at_environment=waiting,
            ready=sum(map(self.episodes.finished, self.episodes.groups)) - len(self.admission.committed),
            committed=len(self.admission.committed),
            groups_per_step=self.config.line.groups_per_step,
            seconds_left=sorted(recent)[len(recent) // 2] * left if recent else None,
        )

    def _counters(self) -> dict[str, int]:
        return {
            "environment_failures": self.episodes.failures,
            "groups_failed": self.failed_groups,
            "groups_replaced": self.replaced,
            "tasks_skipped": self.skipped,
            "preemptions": self.engine.scheduler.preemptions,
            "prefix_hit_tokens": self.engine.cache.hit_tokens,
        }

    def _trajectory(self, key: Any) -> Trajectory | None:
        group = self.episodes.groups.get(key.group)
        return None if group is None else group.samples[key.sample]

    def _checkpoint(self) -> None:
        step = self.admission.version
        state = {
            "version": step,
            "group_size": self.config.algorithm.group_size,
            "weights_id": self.cell.weights_id,
            "admission": self.admission.state_dict(),
            "ledger": self.ledger.to_dict(),
            "ledger_before": self._ledger_before,
            "episodes": self.episodes.state_dict(),
            "next_group": self.next_group,
            "next_task": self.next_task,
            "skipped": self.skipped,
            "failed_groups": self.failed_groups,
            "failed_in_a_row": self.failed_in_a_row,
            "replaced": self.replaced,
            "step_seconds": dict(self.cell.seconds),
            "step_elapsed_s": time.perf_counter() - self._step_started + self._elapsed_before,
        }
        path = self.folder.checkpoint_path(step)
        save_checkpoint(path, self.model.module, self.model.path, self.cell.trainer.state_dict(), state)
        self.folder.prune(self.config.line.keep_checkpoints)

    def _restore(self) -> int | None:
        """Go on from the last checkpoint, or from step 0 when there is none. Returns its step.

        Raises:
            UserError: the settings are not those of the checkpoint.
        """
        step = self.folder.latest_checkpoint()
        if step is None:
            self.folder.rewind(0)
        else:
            state = load_checkpoint(self.folder.checkpoint_path(step), self.model.module, self.cell.trainer)
            self.cell.publish(state["version"], state["weights_id"])
            self._check_settings(state)
            self.admission = Admission.from_state(state["admission"] | {"steps": self.config.line.steps})
            self.folder.rewind(step)
            self.ledger = self.episodes.ledger = Ledger.from_dict(state["ledger"])
            self.next_group, self.next_task = state["next_group"], state["next_task"]
            self.skipped, self.replaced = state["skipped"], state["replaced"]
            self.failed_groups, self.failed_in_a_row = state["failed_groups"], state["failed_in_a_row"]
            self.episodes.load_state(state["episodes"], self.admission.outstanding)
            # Gradients are not part of a checkpoint: those of committed groups are taken again.
            self._pending = list(self.admission.committed)
            self._ledger_before = state["ledger_before"]
            self._counters_before = self._counters()
            self._elapsed_before = state["step_elapsed_s"]
            self.cell.seconds.update(state["step_seconds"])
            self.metrics.extend(self.folder.metrics())
        lost = max(0, self.folder.noted_generated() - self.ledger.generated)
        self.ledger.generate(lost)
        self.ledger.settle(Bucket.LOST, lost)
        self.observer.on_message(
            f"resuming {self.folder.path} at step {step or 0}"
            + (f"; {lost} tokens generated after it are lost" if lost else "")
        )
        return step

    def _check_settings(self, saved: dict[str, Any]) -> None:
        """Refuse settings that the restored state contradicts. More steps than before are welcome."""
        line = self.config.line
        kept = {
            "line.groups_per_step": (saved["admission"]["groups_per_step"], line.groups_per_step),
            "line.max_staleness": (saved["admission"]["max_staleness"], line.max_staleness),
            "algorithm.group_size": (saved["group_size"], self.config.algorithm.group_size),
        }
        for name, (then, now) in kept.items():
            if then != now:
                raise UserError(
                    f"{name} was {then} when this run was saved and is {now} now; a run keeps it to its end"
                )
        state = saved["admission"]
        started = state["consumed"] + len(state["outstanding"])
        if line.steps * line.groups_per_step < started:
            raise UserError(
                f"line.steps = {line.steps} is too few: this run has completed {state['version']} steps and started "
                f"groups for {-(-started // line.groups_per_step)}"
            )


def token_rates(metrics: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of Decode and of Gradient units in a step."""
    decode = metrics["tokens_generated"] / metrics["time_decode_s"] if metrics["time_decode_s"] else 0.0
    train = metrics["tokens_trained"] / metrics["time_gradient_s"] if metrics["time_gradient_s"] else 0.0
    return decode, train
