"""The nouns of the line: tasks, trajectories, groups and sampling settings.

Invariants
* `Trajectory.token_ids`, `.sampled`, `.logprobs` and `.versions` always have one length. A token that the
  policy did not sample (prompt, environment reply) has `sampled=False`, log-prob 0.0 and version -1.
* Tokens are only ever appended: what was sampled is never decoded and encoded again. Where a chat template
  rewrites what was said before, the row ends and the trajectory goes on in a new one (`Trajectory.split`).
* This module imports neither torch nor numpy, so that schedulers and workers can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.errors import UserError

NOT_SAMPLED = -1
"""Policy version recorded for a token that no policy sampled."""


class TrajectoryId(NamedTuple):
    """Which attempt at which sample of which group. Attempt 0 is the first try."""

    group: int
    sample: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.group}.{self.sample}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 is greedy (log-probs are then those at temperature 1).
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        max_tokens: the most tokens to sample, at least 1.
        stop: strings that end a sample; `text` excludes the one that was met.
        stop_token_ids: ids that end a sample beside the model's own end-of-sequence ids.
        ignore_eos: go on after the model's end-of-sequence ids.
        n: samples per prompt.
        seed: seeds the counter-based randomness.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"{name} must be a number, not {value!r}")
        for name in ("top_k", "max_tokens", "n", "seed"):
            _require_integer(name, getattr(self, name))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise UserError(f"stop must be a string or a list of strings, not {self.stop!r}")
        if not isinstance(self.stop_token_ids, Sequence) or isinstance(self.stop_token_ids, str):
            raise UserError(f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            _require_integer("stop_token_ids", token_id)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be a finite number of at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0 keeps every token), not {self.top_k}")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.n < 1:
            raise UserError(f"n must be at least 1, not {self.n}")
        if any(not text for text in self.stop):
            raise UserError("a stop string must not be empty")

    @property
    def cuts(self) -> bool:
        """Whether top-p or top-k removes tokens from the distribution."""
        return self.top_p < 1 or self.top_k > 0


def _require_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be a whole number, not {value!r}")


@dataclass(slots=True)
class Trajectory:
    """One attempt at a task, token by token. All lists have the same length (see the module's invariants).

    The lists are those of its last *row*; `earlier` holds the rows before it, if its chat template rewrote history.
    """

    id: TrajectoryId
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    reward: float | None = None
    completion: str = ""
    mixed_kv: bool = False
    """Whether some token was sampled over KV of older weights (`kv_on_update = "keep"`)."""
    turn_start: int = 0
    """Where in the row the policy's current or last turn begins."""
    turns: int = 0
    """Turns that the policy has ended."""
    turn_rewards: list[float] = field(default_factory=list)
    """What each answered turn earned; `reward` is their sum once the attempt has ended."""
    earlier: list[Trajectory] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    """Why each of the rows in `earlier` ended."""

    @property
    def rows(self) -> list[Trajectory]:
        """Every row of the attempt, in order; each is trained on its own, with the attempt's advantage."""
        return [*self.earlier, self]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)

    def split(self, prompt_ids: Sequence[int], reason: str) -> None:
        """End the row, and begin another one with a prompt that the policy did not sample."""
        row = Trajectory(
            self.id,
            self.temperature,
            self.token_ids,
            self.sampled,
            self.logprobs,
            self.versions,
            self.finish_reason,
            mixed_kv=self.mixed_kv,
        )
        self.earlier.append(row)
        self.splits.append(reason)
        self.token_ids, self.sampled, self.logprobs, self.versions = [], [], [], []
        self.mixed_kv = False
        self.append_observed(prompt_ids)

    def append_observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.token_ids.extend(token_ids)
        self.sampled.extend([False] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.versions.extend([NOT_SAMPLED] * len(token_ids))

    def append_sampled(self, token_id: int, logprob: float, version: int) -> None:
        """Append one token that policy `version` sampled with behaviour log-probability `logprob`."""
        self.token_ids.append(token_id)
        self.sampled.append(True)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def extend_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that policy `version` sampled, with their behaviour log-probabilities."""
        self.token_ids.extend(token_ids)
        self.sampled.extend([True] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return self.sampled.index(True) if True in self.sampled else len(self.sampled)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of all rows."""
        return sum(self.sampled) + sum(sum(row.sampled) for row in self.earlier)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens of all rows."""
        return min(
            v for row in self.rows for v, sampled in zip(row.versions, row.sampled, strict=True) if sampled
        )

    @property
    def complete(self) -> bool:
        """Whether the trajectory ended by itself rather than by a limit on its length."""
        return self.finish_reason == "stop"

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": list(self.id),
            "temperature": self.temperature,
            "token_ids": self.token_ids,
            "sampled": [int(s) for s in self.sampled],
            "logprobs": self.logprobs,
            "versions": self.versions,
            "finish_reason": self.finish_reason,
            "reward": self.reward,
            "completion": self.completion,
            "mixed_kv": self.mixed_kv,
            "turn_start": self.turn_start,
            "turns": self.turns,
            "turn_rewards": self.turn_rewards,
            "earlier": [row.to_dict() for row in self.earlier],
            "splits": self.splits,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        return cls(
            id=TrajectoryId(*data["id"]),
            temperature=data["temperature"],
            token_ids=list(data["token_ids"]),
            sampled=[bool(s) for s in data["sampled"]],
            logprobs=list(data["logprobs"]),
            versions=list(data["versions"]),
            finish_reason=data["finish_reason"],
            reward=data["reward"],
            completion=data["completion"],
            mixed_kv=data["mixed_kv"],
            turn_start=data["turn_start"],
            turns=data["turns"],
            turn_rewards=list(data["turn_rewards"]),
            earlier=[cls.from_dict(row) for row in data["earlier"]],
            splits=list(data["splits"]),
        )


@dataclass(slots=True)
class Group:
    """The samples of one task. `samples[i]` is the current attempt at sample i; a failed one is None."""

    id: int
    task: dict[str, Any]
    prompt_ids: list[int]
    admitted_version: int
    samples: list[Trajectory | None] = field(default_factory=list)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The samples that are valid: rewarded and not failed."""
        return [t for t in self.samples if t is not None and t.reward is not None]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.samples if t is not None and t.reward is not None]
