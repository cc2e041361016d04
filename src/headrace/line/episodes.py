"""Episodes: what happens to a trajectory next, turn by turn, from a prompt over its world's answers to a reward.

Invariants
* These are decisions only. What follows from drawn tokens or from a world's answer comes out as events, and takes
  effect when they are recorded; so a journal needs none of this to be read.
* A failed attempt costs that attempt only: its sample starts again with fresh randomness, a bounded number of times.
  A failure is never a reward.
* Token in, token out: what the policy sampled is never decoded and encoded again (`models/conversation.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.engine.text import completion_text
from headrace.environments import Observation, WorldReply, episode_reward
from headrace.errors import ModelError, UserError
from headrace.models import Conversation, LoadedModel
from headrace.runs.events import AttemptEnded, Event, TokensDrawn, TurnAppended, TurnEnded, WorldAnswered
from headrace.runs.state import Attempt, RunState
from headrace.types import Sampling, TrajectoryId

LEAST_TURN = 2
"""Tokens of the context that a turn needs to be worth starting: one, and the end of the turn."""


class Episodes:
    """Decides for every trajectory of a state.

    Args:
        model: whose tokenizer and chat template are used.
        context_length: the most tokens of one row.
        sampling: how each turn is drawn.
    """

    def __init__(
        self, state: RunState, model: LoadedModel, context_length: int, sampling: Sampling, max_attempts: int
    ) -> None:
        self.state = state
        self.model = model
        self.context_length = context_length
        self.sampling = sampling
        self.max_attempts = max_attempts
        self._conversations: dict[TrajectoryId, Conversation] = {}

    def after_tokens(self, drawn: TokensDrawn) -> Iterator[Event]:
        """What follows from tokens that are in the state already: the turns that have ended, as text."""
        for row in drawn.rows:
            if row.finish is None:
                continue
            attempt = self.state.attempt(row.id)
            sampled = self._sampled(attempt)
            text = completion_text(
                self.model.tokenizer, sampled, row.finish, self.sampling, self.model.eos_token_ids
            )
            message = None
            if self.state.multi_turn:
                message = self._conversation(attempt).parse(sampled, text)
            yield TurnEnded(row.id, text, message)

    def after_reply(self, reply: WorldReply) -> Iterator[Event]:
        """What follows from an answer; the first event is the answer itself."""
        assert isinstance(reply.key, TrajectoryId)
        body = reply.to_dict()
        yield WorldAnswered(reply.key, **body)
        attempt = self.state.attempt(reply.key)
        if reply.error is not None:
            yield self._failed(attempt, reply.error)
        elif not self.state.multi_turn or reply.done:
            yield self._rewarded(attempt)
        elif not attempt.trajectory.turns:
            yield self._open(attempt, reply.observation)
        elif attempt.trajectory.turns >= self._max_turns or self.tokens_left(attempt) <= 0:
            yield self._rewarded(attempt, cut=True)
        else:
            yield self._continue(attempt, reply.observation)

    def tokens_left(self, attempt: Attempt) -> int:
        """Tokens that the policy may still sample in the episode; at least `max_tokens` where there is no limit."""
        assert self.state.config is not None
        limit = self.state.config.environment.max_episode_tokens
        return self.sampling.max_tokens if limit is None else limit - attempt.sampled

    def forget(self, key: TrajectoryId) -> None:
        """The attempt has ended."""
        self._conversations.pop(key, None)

    # Inside

    @property
    def _max_turns(self) -> int:
        assert self.state.config is not None
        return self.state.config.environment.max_turns

    def _sampled(self, attempt: Attempt) -> Sequence[int]:
        """The ids of the attempt's last turn."""
        trajectory = attempt.trajectory
        return trajectory.token_ids[trajectory.turn_start :]

    def _rewarded(self, attempt: Attempt, cut: bool = False) -> AttemptEnded:
        """The end of an episode; one whose rewards add up to nothing that can be trained has failed."""
        try:
            reward = episode_reward(attempt.trajectory.turn_rewards)
        except UserError as error:
            return self._failed(attempt, str(error))
        return AttemptEnded(attempt.id, reward, None, again=False, cut=cut)

    def _failed(self, attempt: Attempt, error: str) -> AttemptEnded:
        return AttemptEnded(attempt.id, None, error, again=attempt.id.attempt + 1 < self.max_attempts)

    def _open(self, attempt: Attempt, observation: Observation | None) -> Event:
        """The first observation of an episode."""
        assert observation is not None
        try:
            conversation = Conversation(
                self.model.tokenizer,
                observation.messages,
                observation.tools,
                stop_token_ids=self.model.eos_token_ids,
            )
            ids = conversation.prompt_ids
        except UserError as error:
            return self._failed(attempt, f"its first observation cannot be rendered: {error}")
        if self.context_length - len(ids) < LEAST_TURN:
            return self._failed(attempt, f"its first observation of {len(ids)} tokens leaves no room")
        self._conversations[attempt.id] = conversation
        held = conversation.to_dict()
        return TurnAppended(attempt.id, tuple(ids), False, "", tuple(held["messages"]), tuple(held["tools"]))

    def _continue(self, attempt: Attempt, observation: Observation | None) -> Event:
        """The next turn, after what the world answered to the last one."""
        messages = observation.messages if observation is not None else []
        conversation = self._conversation(attempt)
        before = len(attempt.messages)
        said: dict[str, Any] = attempt.actions[-1]["message"]
        try:
            extension = conversation.extend(self._sampled(attempt), said, messages)
        except ModelError as error:
            return self._failed(attempt, f"its observation cannot be rendered: {error}")
        here = 0 if extension.split else attempt.rows[-1].tokens
        if self.context_length - here - len(extension.ids) < LEAST_TURN:
            return self._rewarded(attempt, cut=True)
        added = conversation.messages[before:]
        return TurnAppended(attempt.id, tuple(extension.ids), extension.split, extension.reason, tuple(added))

    def _conversation(self, attempt: Attempt) -> Conversation:
        """The attempt's conversation, made again from the state where this process has none."""
        conversation = self._conversations.get(attempt.id)
        if conversation is None:
            conversation = self._conversations[attempt.id] = Conversation.from_dict(
                self.model.tokenizer,
                {"messages": attempt.messages, "tools": attempt.tools},
                stop_token_ids=self.model.eos_token_ids,
            )
        return conversation
