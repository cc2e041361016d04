"""Episodes: each trajectory on its way from a prompt over the generator and the environment to a reward.

Invariants
* A trajectory is in exactly one place: decoding, at its environment, finished, or failed for good.
* A failed attempt costs that attempt only: its tokens are settled as `environment_failed` and the sample
  starts again with fresh randomness, a bounded number of times. A failure is never a reward.
* Every sampled token is booked in the ledger in the moment it is appended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.config import Config
from headrace.engine import Engine, TokenEvent, random_key
from headrace.environments import EnvironmentPool, RewardReply
from headrace.schedule import Bucket, Ledger
from headrace.types import Group, Sampling, Trajectory, TrajectoryId

FAILURES_SHOWN = 5
"""The first failures of an environment are told one by one, …"""

FAILURES_COUNTED = 50
"""… and then one of so many, with their number. Every one is counted in the metrics."""


@dataclass(slots=True)
class Episodes:
    """The episodes of every outstanding group.

    Attributes:
        groups: the outstanding groups by id.
        at_environment: trajectories whose reward is being computed.
        failures: attempts that failed so far in the run.
        last_failure: what the latest one said.
    """

    config: Config
    engine: Engine
    pool: EnvironmentPool
    ledger: Ledger
    report: Callable[[str], None]
    groups: dict[int, Group] = field(default_factory=dict)
    at_environment: set[TrajectoryId] = field(default_factory=set)
    failures: int = 0
    last_failure: str = ""

    @property
    def sampling(self) -> Sampling:
        settings = self.config.sampling
        return Sampling(
            temperature=settings.temperature, max_tokens=settings.max_tokens, stop=tuple(settings.stop)
        )

    def start(self, group: Group, deadline: int) -> None:
        """Start every sample of a new group."""
        self.groups[group.id] = group
        for sample in range(self.config.algorithm.group_size):
            trajectory = self._new_attempt(group, sample, 0)
            group.samples.append(trajectory)
            self._decode(group, trajectory, deadline)

    def resume(self, group: Group, deadline: int) -> None:
        """Take up a restored group: go on decoding, ask again for rewards that had not come."""
        self.groups[group.id] = group
        for trajectory in group.samples:
            if trajectory is None or trajectory.reward is not None:
                continue
            if trajectory.finish_reason is None:
                self._decode(group, trajectory, deadline)
            else:
                self._ask(group, trajectory)

    def on_token(self, event: TokenEvent) -> None:
        """Book one token that the engine drew; a finished trajectory goes to its environment."""
        assert isinstance(event.request_id, TrajectoryId)
        group, trajectory = self._find(event.request_id)
        trajectory.append_sampled(event.token_id, event.logprob, event.version)
        trajectory.mixed_kv |= event.mixed_kv
        self.ledger.generate(1)
        if event.finish_reason is not None:
            trajectory.finish_reason = event.finish_reason
            sampled = trajectory.token_ids[trajectory.prompt_length :]
            trajectory.completion = self.engine.completion_text(sampled, event.finish_reason, self.sampling)
            self._ask(group, trajectory)

    def on_reply(self, reply: RewardReply) -> None:
        """Take a reward, or start the sample again when its environment failed."""
        assert isinstance(reply.key, TrajectoryId)
        self.at_environment.discard(reply.key)
        group, trajectory = self._find(reply.key)
        if reply.error is None:
            trajectory.reward = reply.reward
            return
        self.failures += 1
        self.last_failure = reply.error
        self.ledger.settle(Bucket.ENVIRONMENT_FAILED, trajectory.num_sampled)
        attempt = trajectory.id.attempt + 1
        last = attempt == self.config.environment.max_attempts
        if self.failures <= FAILURES_SHOWN or self.failures % FAILURES_COUNTED == 0:
            self.report(
                f"trajectory {trajectory.id}: the environment failed: {reply.error}; "
                + ("no attempt is left, the sample leaves its group" if last else "trying again")
                + (f" ({self.failures} failures so far)" if self.failures >= FAILURES_SHOWN else "")
            )
        if last:
            group.samples[trajectory.id.sample] = None
        else:
            retry = self._new_attempt(group, trajectory.id.sample, attempt)
            group.samples[trajectory.id.sample] = retry
            self._decode(group, retry, group.admitted_version + self.config.line.max_staleness)

    def finished(self, group_id: int) -> bool:
        """Whether every sample of the group was rewarded or failed for good."""
        return all(t is None or t.reward is not None for t in self.groups[group_id].samples)

    def usable(self, group_id: int) -> bool:
        """Whether a finished group can be trained: at least two samples, and more than half, are valid."""
        valid = len(self.groups[group_id].trajectories)
        return valid >= 2 and 2 * valid > self.config.algorithm.group_size

    def remove(self, group_id: int) -> Group:
        """Take a consumed or closed group out."""
        return self.groups.pop(group_id)

    def tokens_in_flight(self) -> int:
        """Sampled tokens that outstanding groups hold; the ledger must agree."""
        return sum(t.num_sampled for group in self.groups.values() for t in group.samples if t is not None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [
                {
                    "id": group.id,
                    "task": group.task,
                    "prompt_ids": group.prompt_ids,
                    "admitted_version": group.admitted_version,
                    "samples": [None if t is None else t.to_dict() for t in group.samples],
                }
                for group in self.groups.values()
            ],
            "failures": self.failures,
            "last_failure": self.last_failure,
        }

    def load_state(self, state: dict[str, Any], deadlines: dict[int, int]) -> None:
        """Restore what `state_dict` returned and take every group up again."""
        self.failures, self.last_failure = state["failures"], state["last_failure"]
        for data in state["groups"]:
            samples = [None if t is None else Trajectory.from_dict(t) for t in data.pop("samples")]
            group = Group(**data, samples=samples)
            self.resume(group, deadlines[group.id])

    def _new_attempt(self, group: Group, sample: int, attempt: int) -> Trajectory:
        trajectory = Trajectory(TrajectoryId(group.id, sample, attempt), self.config.sampling.temperature)
        trajectory.append_observed(group.prompt_ids)
        return trajectory

    def _decode(self, group: Group, trajectory: Trajectory, deadline: int) -> None:
        # The most urgent deadline first; within one, group by group, so that groups finish and free their slots.
        self.engine.submit(
            trajectory.id,
            trajectory.token_ids,
            self.sampling,
            random_key=random_key(self.config.line.seed, *trajectory.id),
            prompt_length=len(group.prompt_ids),
            priority=(deadline, group.id),
        )

    def _ask(self, group: Group, trajectory: Trajectory) -> None:
        self.at_environment.add(trajectory.id)
        self.pool.submit(trajectory.id, group.task, trajectory.completion)

    def _find(self, key: TrajectoryId) -> tuple[Group, Trajectory]:
        group = self.groups[key.group]
        trajectory = group.samples[key.sample]
        assert trajectory is not None
        assert trajectory.id == key
        return group, trajectory
