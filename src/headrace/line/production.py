"""The loop of a running line and the state it holds.

One thread: before each unit of work it admits what may start, takes what the environments answered, commits
what is ready, and asks `schedule` which unit comes next.

Invariants
* No token is trained above `line.max_staleness` (`schedule/admission.py`), also after a resume.
* A group is consumed once, by one step; the ledger balances after every step.
* Every wait has a name and a deadline; a line that nothing can move any more ends with an error at once.
* A line can go on from each of its checkpoints (`line/checkpoint.py`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace import kernels
from headrace.environments import WorldReply
from headrace.errors import EnvironmentFailure, LineStuckError, NonFiniteError, RunError
from headrace.line import checkpoint
from headrace.line.agreement import Agreement
from headrace.line.cell import Cell
from headrace.line.episodes import Episodes, rollout_sampling
from headrace.line.evaluate import evaluate
from headrace.line.intake import Intake
from headrace.line.metrics import StepAccount, token_rates
from headrace.line.observer import Evaluation, LineResult, LineStatus, Observer
from headrace.line.recovery import token_rows
from headrace.line.run_folder import CONFIG, RunFolder, json_safe
from headrace.line.setup import Workplace
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
from headrace.state.tiers.base import DISK, HOST
from headrace.trainer import GradientResult, Trainer, save_checkpoint
from headrace.types import Group, Trajectory

REPORT_WAIT_S = 10.0
"""A wait says what it waits for this often."""

PROMPT_ANSWER_S = 0.05
"""An environment that answers within this is waited for rather than run ahead of: that would only cost staleness."""

REPLACED_LIMIT = 10
"""With `zero_advantage = "replace"`, at most this many times B groups are replaced in one step; further ones count."""


class Production:
    """A line that runs.

    Args:
        stopping: asked between units; true ends the run with a checkpoint.

    Attributes:
        pending: committed groups whose gradient is not taken yet, the oldest first.
        failed_groups, failed_in_a_row, replaced: groups closed because the environment failed them, since the last
            usable group, and closed without advantage.
        units: the gradients taken for the step that is under way: their groups, and the threads they ran on.
        metrics: the steps' lines of `metrics.jsonl`.
    """

    def __init__(
        self, workplace: Workplace, folder: RunFolder, observer: Observer, stopping: Callable[[], bool]
    ) -> None:
        config = workplace.config
        self.config, self.folder, self.observer, self.stopping = config, folder, observer, stopping
        self.workplace, self.engine, self.pool = workplace, workplace.engine, workplace.pool
        self.model = workplace.model
        reference = copy.deepcopy(self.model.module) if config.algorithm.kl_coef > 0 else None
        trainer = Trainer(self.model.module, config.algorithm, config.trainer, config.line.steps, reference)
        self.cell = Cell(self.engine, trainer, config.line.decode_steps)
        # A number of threads that the settings give is kept; otherwise it follows what the machine has left.
        share = ThreadShare(len(core_numbers()), torch.get_num_threads())
        self.threads = None if config.line.threads else share
        self.admission = Admission(config.line.steps, config.line.groups_per_step, config.line.max_staleness)
        self.ledger = Ledger()
        self.episodes = Episodes(
            config,
            self.engine,
            self.pool,
            self.ledger,
            observer.on_message,
            rollout_sampling(config),
            config.environment.max_attempts,
        )
        self.intake = Intake(self.engine, self.pool, observer.on_message)
        self.agreement = Agreement(config)
        self.failed_groups = 0
        self.failed_in_a_row = 0
        self.replaced = 0
        self.pending: list[int] = []
        self.units: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.open_account(self.ledger.to_dict())
        self._rates = (0.0, 0.0)
        self._told_of_neighbours = False
        self._taught_nothing = 0

    def open_account(self, books: dict[str, int], elapsed_s: float = 0.0) -> None:
        """Begin the account of a step at these totals of the ledger, `elapsed_s` after the step began."""
        self.account = StepAccount(books, self._counters(), elapsed_s)

    def run(self, resume: bool) -> LineResult:
        model = self.config.model
        if model.device == "cpu" and model.dtype == "float32" and (reason := kernels.unavailable_reason()):
            self.observer.on_message(f"generation runs on PyTorch's operators, more slowly: {reason}")
        self.journal = checkpoint.open_journal(self)
        try:
            return self._run(resume)
        finally:
            self.journal.close()

    def _run(self, resume: bool) -> LineResult:
        if resume:
            checkpoint.restore(self)
        checkpoint.begin(self, resumed=resume)
        result = LineResult(self.folder.path, self.metrics)
        if resume:
            result.before = self.folder.evaluation("before")
        # Weights that were trained already cannot tell what came before.
        if (
            result.before is None
            and not self.admission.version
            and self.config.eval.tasks
            and not self.stopping()
        ):
            result.before = self._evaluate("before")
            # What it found in the cache belongs to no step.
            self.account.counters = self._counters()
        self.account.start_clock()
        try:
            while not self.admission.finished:
                if self.stopping():
                    self.journal.record("stop", {"reason": "asked to"})
                    checkpoint.save(self)
                    result.interrupted = True
                    return result
                self._advance()
        except (EnvironmentFailure, LineStuckError) as error:
            # The environment is broken, not the line: what it holds is worth keeping.
            checkpoint.save(self)
            raise type(error)(f"{error}; mend it, then continue with --resume {self.folder.path}") from error
        checkpoint.save(self)
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
            self._adapt_threads(self.threads)
        self.observer.on_status(self._status(unit))
        try:
            match unit:
                case Unit.DECODE:
                    self._decode()
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
        self.journal.commit()

    def _decode(self) -> None:
        """A few engine steps, each counted before it is known to anyone: what a crash takes is `lost`."""
        counted = self.ledger.generated
        events = self.cell.decode(lambda drawn: self.folder.note_generated(counted + drawn))
        self.journal.record("tokens", {"version": self.cell.version, "rows": token_rows(events, self)})
        for event in events:
            self.episodes.on_token(event)

    def _take(self, reply: WorldReply) -> None:
        self.journal.record("world", reply.to_dict() | {"id": list(reply.key)})
        self.episodes.on_reply(reply)

    def _take_replies(self) -> None:
        """Take what the environments have answered; an idle engine waits a moment for what is about to come."""
        for reply in self.pool.poll():
            self._take(reply)
        for report in self.pool.take_reports():
            self.observer.on_message(report)
        while self.episodes.at_environment and not self.engine.num_unfinished and not self.pending:
            with self.cell.booked(Unit.WAIT):
                replies = self.pool.wait(PROMPT_ANSWER_S)
            if not replies:
                return
            for reply in replies:
                self._take(reply)

    def _admit(self) -> None:
        """Start groups while the bound allows it and the line gains by it."""
        while self.admission.can_admit() and self._worth_starting():
            group = self.intake.take(self.admission.version)
            deadline = self.admission.admit(group.id)
            self.journal.record(
                "admit",
                {
                    "group": group.id,
                    "task": group.task,
                    "version": group.admitted_version,
                    "deadline": deadline,
                    "next_task": self.intake.next_task,
                    "skipped": self.intake.skipped,
                },
            )
            self.episodes.start(group)

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
                self._close(group_id, Bucket.ZERO_ADVANTAGE)
            else:
                ready.append(group_id)
        while (group_id := self.admission.next_commit(ready)) is not None:
            self.journal.record("commit", {"group": group_id})
            self.commit(group_id)

    def commit(self, group_id: int) -> None:
        """Give a finished group a place in the step."""
        self.failed_in_a_row = 0
        self.admission.commit(group_id)
        self.pending.append(group_id)

    def _replaceable(self, group_id: int) -> bool:
        if self.config.algorithm.zero_advantage != "replace":
            return False
        replaced = self.replaced - self.account.counters["groups_replaced"]
        rewards = self.episodes.groups[group_id].rewards
        return len(set(rewards)) == 1 and replaced < REPLACED_LIMIT * self.config.line.groups_per_step

    def _close_failed(self, group_id: int) -> None:
        self._close(group_id, Bucket.ENVIRONMENT_FAILED)
        limit = 2 * self.config.line.groups_per_step
        self.observer.on_message(
            f"group {group_id} is closed: the environment failed too many of its samples"
        )
        if self.failed_in_a_row >= limit:
            raise EnvironmentFailure(
                f"the environment failed {limit} groups in a row; the last failure: {self.episodes.last_failure}"
            )

    def _close(self, group_id: int, bucket: Bucket) -> None:
        self.journal.record("close", {"group": group_id, "bucket": bucket.value})
        self.close_group(group_id, bucket)

    def close_group(self, group_id: int, bucket: Bucket) -> None:
        """Take a group that will not be trained out of the line."""
        if bucket is Bucket.ENVIRONMENT_FAILED:
            self.failed_groups += 1
            self.failed_in_a_row += 1
        else:
            self.replaced += 1
        self.admission.close(group_id)
        group = self.episodes.remove(group_id)
        self.ledger.settle(bucket, sum(t.num_sampled for t in group.trajectories))

    def _state(self) -> LineState:
        return LineState(
            groups_per_step=self.config.line.groups_per_step,
            committed=len(self.admission.committed),
            pending_gradient_groups=len(self.pending),
            pending_gradient_tokens=sum(map(self._packed_tokens, self.pending)),
            micro_batch_tokens=self.config.trainer.micro_batch_tokens,
            decodable=self.engine.num_unfinished,
            waiting_on_environment=len(self.episodes.at_environment),
        )

    def _packed_tokens(self, group_id: int) -> int:
        rows = [row for trajectory in self.episodes.groups[group_id].trajectories for row in trajectory.rows]
        prompts = {tuple(row.token_ids[: row.prompt_length]) for row in rows}
        return sum(map(len, prompts)) + sum(len(row.token_ids) - row.prompt_length for row in rows)

    def _gradient(self) -> None:
        """Take the gradient of the oldest committed groups, about one micro-batch of them."""
        taken, tokens = 0, 0
        for group_id in self.pending:
            size = self._packed_tokens(group_id)
            if taken and tokens + size > self.config.trainer.micro_batch_tokens:
                break
            taken, tokens = taken + 1, tokens + size
        groups = self.pending[:taken]
        self.take_gradient(groups)
        self.journal.record("gradient", self.units[-1])

    def take_gradient(self, groups: list[int]) -> None:
        """Take the gradient of these committed groups, and remember how."""
        members = [self.episodes.groups[group_id].trajectories for group_id in groups]
        result = self.cell.gradient(members, self.config.line.max_staleness)
        self.agreement.mismatch.merge(result.statistics.mismatch)
        self.units.append({"groups": groups, "threads": torch.get_num_threads()})
        self.pending = [group_id for group_id in self.pending if group_id not in groups]

    def _step(self) -> None:
        """Update the weights, publish them, settle the consumed groups, and log the step."""
        self._check_agreement()
        result = self.cell.optimizer_step()
        digest = self.cell.trainer.digest()
        groups = self.settle_step(result.gradient)
        step = self.admission.version
        metrics = self.account.close(
            step=step,
            groups=groups,
            result=result,
            mismatch=self.agreement.take(),
            seconds=self.cell.take_seconds(),
            books=self.ledger.to_dict(),
            counters=self._counters(),
        )
        self._rates = token_rates(metrics)
        # The journal first: the logs are made again from it if this is the last that is written.
        self.journal.record(
            "step",
            {
                "step": step,
                "groups": [group.id for group in groups],
                "digest": digest,
                "weights_id": self.cell.weights_id,
                "updated": result.updated,
                "threads": torch.get_num_threads(),
                "metrics": json_safe(metrics),
            },
        )
        self.journal.commit()
        self.log_step(step, groups, metrics)
        self.observer.on_step(metrics)
        if not result.updated:
            self._taught_nothing += 1
            self.observer.on_message(
                f"step {step} taught nothing: within each group all rewards were equal. Now and then that is fine; "
                "if it goes on, the tasks are too easy or too hard, or the reward needs partial credit"
                if self._taught_nothing == 1
                else f"step {step} taught nothing either, {self._taught_nothing} steps by now"
            )
        every = self.config.line.checkpoint_every
        if every and step % every == 0 and not self.admission.finished:
            checkpoint.save(self)

    def _adapt_threads(self, share: ThreadShare) -> None:
        before = share.threads
        self.cell.adapt_threads(share)
        if share.threads < before and not self._told_of_neighbours:
            self._told_of_neighbours = True
            self.observer.on_message(
                f"other processes use the cores: computing with {share.threads} of {share.most} threads as long as "
                "they do (`threads` in metrics.jsonl says it for every step)"
            )

    def settle_step(self, gradient: GradientResult) -> list[Group]:
        """Complete the step in the books: its groups leave the line."""
        groups = [self.episodes.remove(group_id) for group_id in self.admission.complete_step()]
        self.ledger.settle(Bucket.TRAINED, gradient.tokens_trained)
        self.ledger.settle(Bucket.ZERO_ADVANTAGE, gradient.tokens_zero_advantage)
        self.ledger.settle(Bucket.MASKED, gradient.tokens_masked)
        self.ledger.check(self.episodes.tokens_in_flight())
        self.units = []
        return groups

    def log_step(self, step: int, groups: list[Group], metrics: dict[str, Any]) -> None:
        """Write a completed step into the run folder's logs."""
        self.folder.append_trajectories(step, groups)
        self.folder.append_metrics(metrics)
        self.metrics.append(metrics)

    def _check_agreement(self) -> None:
        """Stop the run where rollouts are not the policy's any more, with its state saved."""
        self.agreement.complete(self.cell, self.episodes)
        problem = self.agreement.judge()
        if problem is not None:
            checkpoint.save(self)
            raise RunError(
                f"step {self.admission.version + 1}: {problem}; the run is saved: edit {self.folder.path / CONFIG} and "
                f"continue with --resume {self.folder.path}"
            )

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
                    self._take(reply)
                if replies or self.stopping():
                    return
                waited = time.monotonic() - started
                if waited >= limit:
                    raise LineStuckError(f"waited {waited:.0f} s (line.wait_timeout_s) for {what}")
                self.observer.on_message(f"waiting on {what} for {waited:.0f} s of at most {limit:.0f}")

    def _evaluate(self, name: str) -> Evaluation:
        """Measure held-out reward and keep the answers in the run folder."""
        evaluation = evaluate(self.workplace, self.admission.version)
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
        directory = self.engine.directory
        hits = {tier.name: tier.counters.hits * directory.cache.block_size for tier in directory.tiers}
        return {
            "environment_failures": self.episodes.failures,
            "groups_failed": self.failed_groups,
            "groups_replaced": self.replaced,
            "tasks_skipped": self.intake.skipped,
            "preemptions": self.engine.scheduler.preemptions,
            "prefix_hit_tokens": self.engine.cache.hit_tokens,
            "kv_host_hit_tokens": hits.get(HOST, 0),
            "kv_disk_hit_tokens": hits.get(DISK, 0),
        }

    def _trajectory(self, key: Any) -> Trajectory | None:
        group = self.episodes.groups.get(key.group)
        return None if group is None else group.samples[key.sample]
