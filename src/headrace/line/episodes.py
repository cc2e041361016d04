"""Episodes: each trajectory on its way from a prompt over the generator and its world to a reward.

Invariants
* A trajectory is in exactly one place: decoding, at its environment, finished, or failed for good.
* A failed attempt costs that attempt only: its tokens are settled as `environment_failed` and the sample
  starts again with fresh randomness, a bounded number of times. A failure is never a reward.
* Every sampled token is booked in the ledger in the moment it is appended.
* What sampled tokens and the world's replies make of an episode is a function of them alone: fed again from a
  journal (`passive`), they lead to the same state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.config import Config
from headrace.engine import Engine, TokenEvent, random_key
from headrace.environments import Action, EnvironmentPool, Observation, WorldReply, episode_reward
from headrace.errors import ModelError, UserError
from headrace.line.world import World
from headrace.models import Conversation
from headrace.schedule import Bucket, Ledger, ReturnTimes
from headrace.types import Group, Sampling, Trajectory, TrajectoryId

FAILURES_SHOWN = 5
"""The first failures of an environment are told one by one, …"""

FAILURES_COUNTED = 50
"""… and then one of so many, with their number. Every one is counted in the metrics."""

LEAST_TURN = 2
"""Tokens of the context that a turn needs to be worth starting: one, and the end of the turn."""


def rollout_sampling(config: Config) -> Sampling:
    """How rollouts of a run are drawn."""
    settings = config.sampling
    return Sampling(
        temperature=settings.temperature, max_tokens=settings.max_tokens, stop=tuple(settings.stop)
    )


@dataclass(slots=True)
class Episodes:
    """The episodes of every outstanding group.

    Attributes:
        sampling: how each turn is drawn.
        max_attempts: attempts at one sample before it counts as failed for good.
        groups: the outstanding groups by id.
        at_environment: trajectories that their environment is to answer.
        worlds: the other side of each conversation that is going on.
        failures: attempts that failed so far in the run.
        last_failure: what the latest one said.
        returns: how long worlds take to answer, by turn: their sessions' KV is brought back by then.
        passive: whether engine and environment are left alone, while a journal is read.
    """

    config: Config
    engine: Engine
    pool: EnvironmentPool
    ledger: Ledger
    report: Callable[[str], None]
    sampling: Sampling
    max_attempts: int
    groups: dict[int, Group] = field(default_factory=dict)
    at_environment: set[TrajectoryId] = field(default_factory=set)
    worlds: dict[TrajectoryId, World] = field(default_factory=dict)
    failures: int = 0
    last_failure: str = ""
    passive: bool = False
    returns: ReturnTimes = field(default_factory=ReturnTimes)

    @property
    def multi_turn(self) -> bool:
        return self.pool.multi_turn

    def start(self, group: Group) -> None:
        """Start every sample of a new group."""
        self.groups[group.id] = group
        for sample in range(self.config.algorithm.group_size):
            self._begin(group, sample, 0)

    def take_up(self) -> None:
        """Hand every unfinished trajectory on to where it was: the engine, or its environment."""
        self.passive = False
        for group in self.groups.values():
            for trajectory in group.samples:
                if trajectory is None or trajectory.reward is not None:
                    continue
                waiting = trajectory.id in self.at_environment
                if self.multi_turn:
                    self._resume_world(group, trajectory)
                elif waiting:
                    self.pool.submit(trajectory.id, group.task, trajectory.completion)
                if not waiting:
                    self._decode(group, trajectory)

    def on_token(self, event: TokenEvent) -> None:
        """Book one token that the engine drew; a turn that ends goes to its environment."""
        assert isinstance(event.request_id, TrajectoryId)
        group, trajectory = self._find(event.request_id)
        trajectory.append_sampled(event.token_id, event.logprob, event.version)
        trajectory.mixed_kv |= event.mixed_kv
        self.ledger.generate(1)
        if event.finish_reason is not None:
            self._end_turn(group, trajectory, event.finish_reason)

    def on_reply(self, reply: WorldReply) -> None:
        """Take what a world answered: the first observation, the next one, or the end; or start again on a failure."""
        assert isinstance(reply.key, TrajectoryId)
        group, trajectory = self._find(reply.key)
        self.at_environment.discard(reply.key)
        if reply.error is not None:
            self._fail(group, trajectory, reply.error)
        elif not self.multi_turn:
            trajectory.turn_rewards.append(reply.reward)
            self._finish(group, trajectory)
        elif trajectory.id not in self.worlds:
            self._open(group, trajectory, reply)
        else:
            self._continue(group, trajectory, reply)

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
            "at_environment": [list(key) for key in sorted(self.at_environment)],
            "worlds": [[list(key), world.to_dict()] for key, world in self.worlds.items()],
            "failures": self.failures,
            "last_failure": self.last_failure,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; `take_up` sets it going."""
        self.failures, self.last_failure = state["failures"], state["last_failure"]
        for data in state["groups"]:
            samples = [None if t is None else Trajectory.from_dict(t) for t in data["samples"]]
            self.groups[data["id"]] = Group(**(data | {"samples": samples}))
        self.at_environment = {TrajectoryId(*key) for key in state["at_environment"]}
        self.worlds = {
            TrajectoryId(*key): World.from_dict(self.engine.tokenizer, self.engine.model.eos_token_ids, world)
            for key, world in state["worlds"]
        }

    # An attempt, from its beginning to its end

    def _begin(self, group: Group, sample: int, attempt: int) -> None:
        trajectory = Trajectory(TrajectoryId(group.id, sample, attempt), self.sampling.temperature)
        if sample == len(group.samples):
            group.samples.append(trajectory)
        else:
            group.samples[sample] = trajectory
        if self.multi_turn:
            self.at_environment.add(trajectory.id)
            if not self.passive:
                self.pool.reset(trajectory.id, group.task)
        else:
            trajectory.append_observed(group.prompt_ids)
            self._start_turn(group, trajectory)

    def _open(self, group: Group, trajectory: Trajectory, reply: WorldReply) -> None:
        """The first observation of an episode."""
        assert reply.observation is not None
        try:
            conversation = self._conversation(reply.observation)
        except UserError as error:
            self._give_up(group, trajectory, f"its first observation cannot be rendered: {error}")
            return
        self.worlds[trajectory.id] = World(conversation, [], [reply])
        trajectory.append_observed(conversation.prompt_ids)
        tokens = len(trajectory.token_ids)
        if self.engine.context_length - tokens < LEAST_TURN:
            self._give_up(group, trajectory, f"its first observation of {tokens} tokens leaves no room")
            return
        self._start_turn(group, trajectory)

    def _conversation(self, observation: Observation) -> Conversation:
        return Conversation(
            self.engine.tokenizer,
            observation.messages,
            observation.tools,
            stop_token_ids=self.engine.model.eos_token_ids,
        )

    def _start_turn(self, group: Group, trajectory: Trajectory) -> None:
        trajectory.finish_reason = None
        trajectory.turn_start = len(trajectory.token_ids)
        if not self.passive:
            self._decode(group, trajectory)

    def _end_turn(self, group: Group, trajectory: Trajectory, finish_reason: str) -> None:
        """The policy has ended a turn: the world is asked."""
        trajectory.finish_reason = finish_reason
        trajectory.turns += 1
        sampled = trajectory.token_ids[trajectory.turn_start :]
        text = self.engine.completion_text(sampled, finish_reason, self.sampling)
        self.at_environment.add(trajectory.id)
        if not self.multi_turn:
            trajectory.completion = text
            if not self.passive:
                self.pool.submit(trajectory.id, group.task, text)
            return
        trajectory.completion += ("\n" if trajectory.completion else "") + text
        world = self.worlds[trajectory.id]
        action = Action(text, world.conversation.parse(sampled, text), finish_reason)
        world.actions.append(action)
        if not self.passive:
            self.pool.step(trajectory.id, action)
            back_in = self.returns.predict(trajectory.turns)
            if back_in is not None:
                self.engine.expect(trajectory.token_ids, back_in)

    def _continue(self, group: Group, trajectory: Trajectory, reply: WorldReply) -> None:
        """What the world answered to a turn."""
        world = self.worlds[trajectory.id]
        world.replies.append(reply)
        self.returns.record(trajectory.turns, reply.seconds)
        trajectory.turn_rewards.append(reply.reward)
        if reply.done:
            self._finish(group, trajectory)
            return
        if trajectory.turns >= self.config.environment.max_turns or self._tokens_left(trajectory) <= 0:
            self._cut(group, trajectory)
            return
        messages = reply.observation.messages if reply.observation is not None else []
        sampled = trajectory.token_ids[trajectory.turn_start :]
        try:
            extension = world.conversation.extend(sampled, world.actions[-1].message, messages)
        except ModelError as error:
            self._give_up(group, trajectory, f"its observation cannot be rendered: {error}")
            return
        before = 0 if extension.split else len(trajectory.token_ids)
        if self.engine.context_length - before - len(extension.ids) < LEAST_TURN:
            self._cut(group, trajectory)
            return
        if extension.split:
            trajectory.split(extension.ids, extension.reason)
        else:
            trajectory.append_observed(extension.ids)
        self._start_turn(group, trajectory)

    def _cut(self, group: Group, trajectory: Trajectory) -> None:
        """A limit on turns or tokens ends the episode with what it has earned."""
        trajectory.finish_reason = "length"
        if not self.passive:
            self.pool.drop(trajectory.id)
        self._finish(group, trajectory)

    def _finish(self, group: Group, trajectory: Trajectory) -> None:
        """An episode has its last reward; one whose rewards add up to nothing that can be trained has failed."""
        try:
            trajectory.reward = episode_reward(trajectory.turn_rewards)
        except UserError as error:
            self._fail(group, trajectory, str(error))
            return
        self._close(trajectory)

    def _close(self, trajectory: Trajectory) -> None:
        """An episode is over, one way or another: nobody will go on from its KV."""
        if self.worlds.pop(trajectory.id, None) is not None and not self.passive:
            self.engine.release(trajectory.token_ids)

    def _fail(self, group: Group, trajectory: Trajectory, error: str) -> None:
        """An attempt whose environment failed: start the sample again, or give it up."""
        self._close(trajectory)
        self.failures += 1
        self.last_failure = error
        self.ledger.settle(Bucket.ENVIRONMENT_FAILED, trajectory.num_sampled)
        attempt = trajectory.id.attempt + 1
        last = attempt >= self.max_attempts
        if not self.passive and (self.failures <= FAILURES_SHOWN or self.failures % FAILURES_COUNTED == 0):
            self.report(
                f"trajectory {trajectory.id}: the environment failed: {error}; "
                + ("no attempt is left, the sample leaves its group" if last else "trying again")
                + (f" ({self.failures} failures so far)" if self.failures >= FAILURES_SHOWN else "")
            )
        if last:
            group.samples[trajectory.id.sample] = None
        else:
            self._begin(group, trajectory.id.sample, attempt)

    def _give_up(self, group: Group, trajectory: Trajectory, error: str) -> None:
        """Fail an attempt whose world still runs, and has said what cannot be used."""
        if not self.passive:
            self.pool.drop(trajectory.id)
        self._fail(group, trajectory, error)

    def _resume_world(self, group: Group, trajectory: Trajectory) -> None:
        """After a restart: the episode's world, brought to where it was."""
        world = self.worlds.get(trajectory.id)
        if world is None:
            self.pool.reset(trajectory.id, group.task)
        else:
            # Copies: this world goes on while the pool still reads.
            actions, replies = list(world.actions), list(world.replies)
            self.pool.resume(trajectory.id, group.task, actions, replies, replies[-1].snapshot)

    def _tokens_left(self, trajectory: Trajectory) -> int:
        limit = self.config.environment.max_episode_tokens
        return self.sampling.max_tokens if limit is None else limit - trajectory.num_sampled

    def _decode(self, group: Group, trajectory: Trajectory) -> None:
        sampling = self.sampling
        # What a turn may sample is fixed at its beginning, also if it is taken up in its middle.
        begun = len(trajectory.token_ids) - trajectory.turn_start
        most = min(sampling.max_tokens, self._tokens_left(trajectory) + begun)
        if most != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=most)
        row = (len(trajectory.earlier),) if trajectory.earlier else ()
        # The most urgent deadline first; within one, group by group, so that groups finish and free their slots.
        self.engine.submit(
            trajectory.id,
            trajectory.token_ids,
            sampling,
            random_key=random_key(self.config.line.seed, *trajectory.id, *row),
            prompt_length=trajectory.turn_start,
            keep_kv=self.multi_turn,
            priority=(group.admitted_version + self.config.line.max_staleness, group.id),
        )

    def _find(self, key: TrajectoryId) -> tuple[Group, Trajectory]:
        group = self.groups[key.group]
        trajectory = group.samples[key.sample]
        assert trajectory is not None
        assert trajectory.id == key
        return group, trajectory
