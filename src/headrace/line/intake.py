"""New groups: the environment's train tasks in their order, each as the prompt of a group."""

from __future__ import annotations

from collections.abc import Callable

from headrace.environments import EnvironmentPool
from headrace.errors import RunError, UserError
from headrace.line.setup import check_prompt
from headrace.models import LoadedModel
from headrace.runs.events import GroupAdmitted
from headrace.runs.state import RunState

SKIPPED_LIMIT = 100
"""Tasks in a row whose prompts do not fit before the run ends."""


class Intake:
    """Reads tasks and renders their prompts."""

    def __init__(
        self, model: LoadedModel, context_length: int, pool: EnvironmentPool, report: Callable[[str], None]
    ) -> None:
        self.model, self.context_length = model, context_length
        self.pool, self.report = pool, report

    def next(self, state: RunState) -> GroupAdmitted:
        """The admission of a new group, of the next task whose prompt fits the context.

        Raises:
            RunError: `SKIPPED_LIMIT` tasks in a row do not fit.
            EnvironmentFailure: the environment gave no task.
        """
        problem: UserError | None = None
        skipped = state.counters["tasks_skipped"]
        for index in range(state.next_task, state.next_task + SKIPPED_LIMIT):
            task = self.pool.train_task(index)
            ids: tuple[int, ...] = ()
            try:
                if not self.pool.multi_turn:
                    ids = tuple(check_prompt(self.model.tokenizer, self.context_length, task))
            except UserError as error:
                skipped += 1
                self.report(f"task {index} is skipped: {error}")
                problem = error
                continue
            return GroupAdmitted(state.next_group, task, ids, index + 1, skipped)
        raise RunError(f"{SKIPPED_LIMIT} tasks in a row do not fit the context: {problem}")
