"""New groups: the environment's train tasks in their order, each as the prompt of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.engine import Engine
from headrace.environments import EnvironmentPool
from headrace.errors import RunError, UserError
from headrace.line.setup import check_prompt
from headrace.types import Group

SKIPPED_LIMIT = 100
"""Tasks in a row whose prompts do not fit before the run ends."""


@dataclass(slots=True)
class Intake:
    """Where the line is in the environment's tasks.

    Attributes:
        next_group, next_task: the ids of the next group and of the next task.
        skipped: tasks whose prompts did not fit, so far in the run.
    """

    engine: Engine
    pool: EnvironmentPool
    report: Callable[[str], None]
    next_group: int = 0
    next_task: int = 0
    skipped: int = 0

    def take(self, version: int) -> Group:
        """A new group, admitted at `version`, of the next task whose prompt fits the context.

        Raises:
            RunError: `SKIPPED_LIMIT` tasks in a row do not fit.
            EnvironmentFailure: the environment gave no task.
        """
        problem: UserError | None = None
        for _ in range(SKIPPED_LIMIT):
            task = self.pool.train_task(self.next_task)
            self.next_task += 1
            try:
                group = self.group(self.next_group, task, version)
            except UserError as error:
                self.skipped += 1
                self.report(f"task {self.next_task - 1} is skipped: {error}")
                problem = error
                continue
            self.next_group += 1
            return group
        raise RunError(f"{SKIPPED_LIMIT} tasks in a row do not fit the context: {problem}")

    def group(self, group_id: int, task: dict[str, Any], version: int) -> Group:
        """A group of a task. In a conversation each sample has its own first observation instead of a prompt.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        prompt_ids = [] if self.pool.multi_turn else check_prompt(self.engine, task)
        return Group(group_id, task, prompt_ids, version)
