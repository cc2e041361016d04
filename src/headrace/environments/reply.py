"""The pool's reply to one request: a reward, what a world answered, or why there is neither."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from headrace.environments.base import Observation, Step


@dataclass(frozen=True, slots=True)
class WorldReply:
    """The answer to one request: a reward (and what the policy sees next), or one line that says why there is none.

    Args:
        key: the request's.
        reward: what the completion or the turn has earned, 0.0 for a `reset`; None if it failed.
        error: why it failed; the attempt is then over.
        observation: what the policy sees next; None when the episode is over or the form has no turns.
        done: whether the episode is over.
        info: what the environment says about the turn, plain data.
        snapshot: where the world stands after this reply, plain data, if its class can say; else None.
        seconds: how long the environment took for it. Waiting for a worker, or for a place in one, is not counted.
    """

    key: Hashable
    reward: float | None
    error: str | None
    observation: Observation | None = None
    done: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    snapshot: Any = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def step(self) -> Step:
        """What the world answered. Not for a reply with an error."""
        assert self.reward is not None
        return Step(self.observation, self.reward, self.done, self.info)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON gives back unchanged, without the key."""
        return {
            "reward": self.reward,
            "error": self.error,
            "observation": None if self.observation is None else asdict(self.observation),
            "done": self.done,
            "info": self.info,
            "snapshot": self.snapshot,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The reply that `to_dict` wrote, under `data["key"]` or else None. What else `data` holds is ignored."""
        observation = data["observation"]
        return cls(
            data.get("key"),
            data["reward"],
            data["error"],
            None if observation is None else Observation(**observation),
            data["done"],
            data["info"],
            data["snapshot"],
            data["seconds"],
        )
