"""Everything that can happen in a run, one frozen dataclass for each, and their one codec.

Invariants
* An event holds every fact that the state needs afterwards: folding (`runs/state.py`) needs no tokenizer, no chat
  template, no clock and no settings beside those that `RunStarted` carries.
* `decode(encode(events))` equals `events`. What is not an event of this schema raises `ValueError` or `KeyError`.
* Token ids and log-probs travel apart from the rest, as packed bytes: 4 bytes for an id, 4 for a log-prob (8 where
  float32 does not hold it). Without its payload a `TokensDrawn` still says how many tokens were drawn, by whom.

The events of one commit are one *frame*: one record of the journal, written whole or not at all.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from headrace.measures import Divergence, SampleOutcome, TokenStatistics
from headrace.schedule.ledger import Bucket
from headrace.types import TrajectoryId

SCHEMA = 1
"""Of the events below; a run that was begun under another one is not folded."""


class TokenRow(NamedTuple):
    """What one sequence drew in a Decode unit.

    `mixed_kv` says that KV of older weights took part; `finish` is "stop" or "length" where the turn ended.
    """

    id: TrajectoryId
    drawn: int
    mixed_kv: bool
    finish: str | None


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A process takes the run up, for the first time or again; `config` are its settings from here on.

    Recorded gradients of a step keep the settings they were taken under: if the step that is under way has any, the
    new `[algorithm]` and `[trainer]` hold from the step after it.
    """

    kind: ClassVar[str] = "start"
    schema: int
    config: dict[str, Any]
    number: int
    weights_id: str
    digest: str
    resumed: bool
    multi_turn: bool
    threads: int
    fingerprint: str
    algorithm_file: str | None = None


@dataclass(frozen=True, slots=True)
class GroupAdmitted:
    """A group of the task at `next_task - 1` starts; in a conversation each sample has its own first observation."""

    kind: ClassVar[str] = "admit"
    group: int
    task: dict[str, Any]
    prompt_ids: tuple[int, ...]
    next_task: int
    skipped: int


@dataclass(frozen=True, slots=True)
class TurnAppended:
    """What the policy sees before its next turn, as it was rendered.

    `split` says that the ids are the prompt of a new row, for `reason`. `messages` (and for the first turn `tools`)
    are what the conversation holds more than before: the policy's turn in the form in which it was rendered, and the
    world's answer.
    """

    kind: ClassVar[str] = "turn"
    id: TrajectoryId
    ids: tuple[int, ...]
    split: bool
    reason: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TokensDrawn:
    """A Decode unit's tokens, all drawn under one policy version."""

    kind: ClassVar[str] = "tokens"
    cell: str
    version: int
    rows: tuple[TokenRow, ...]
    wide: bool = False
    payload: bytes | None = None

    @classmethod
    def pack(
        cls, cell: str, version: int, rows: Sequence[TokenRow], ids: Sequence[int], logprobs: Sequence[float]
    ) -> TokensDrawn:
        """From the rows' tokens, one row after another."""
        narrow = array("f", logprobs)
        wide = any(map(float.__ne__, narrow, logprobs))
        values = array("d", logprobs) if wide else narrow
        return cls(cell, version, tuple(rows), wide, _little(array("i", ids)) + _little(values))

    @property
    def tokens(self) -> int:
        return sum(row.drawn for row in self.rows)

    @property
    def payload_bytes(self) -> int:
        return self.tokens * (12 if self.wide else 8)

    def unpack(self) -> tuple[array[int], array[float]]:
        """Ids and log-probs, row after row. Needs the payload."""
        assert self.payload is not None
        split = 4 * self.tokens
        ids, logprobs = array("i"), array("d" if self.wide else "f")
        ids.frombytes(self.payload[:split])
        logprobs.frombytes(self.payload[split:])
        if sys.byteorder == "big":
            ids.byteswap()
            logprobs.byteswap()
        return ids, logprobs


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The policy has ended a turn: its text, and in a conversation the message that it was parsed to."""

    kind: ClassVar[str] = "said"
    id: TrajectoryId
    text: str
    message: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class WorldAnswered:
    """A reward, an observation, the end of an episode, or an error; fields as in `environments.WorldReply`."""

    kind: ClassVar[str] = "world"
    id: TrajectoryId
    reward: float | None
    error: str | None
    observation: dict[str, Any] | None
    done: bool
    info: dict[str, Any]
    snapshot: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt has its reward, or has failed with `error`; then `again` says whether its sample starts anew.

    `cut` says that a limit on turns or tokens ended the episode.
    """

    kind: ClassVar[str] = "ended"
    id: TrajectoryId
    reward: float | None
    error: str | None
    again: bool
    cut: bool = False


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """A group leaves the line without being trained; its tokens go to `bucket`."""

    kind: ClassVar[str] = "close"
    group: int
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class GroupCommitted:
    """A finished group has a place in the step that is under way."""

    kind: ClassVar[str] = "commit"
    group: int


@dataclass(frozen=True, slots=True)
class ContributionOpened:
    """A cell begins a gradient sum of its own for the step that is under way.

    `fingerprint` is of the kernels that compute it: on others the same sum is other bits.
    """

    kind: ClassVar[str] = "opened"
    number: int
    cell: str
    incarnation: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class GradientTaken:
    """A Gradient unit: these groups' gradients, in this order, are in the contribution."""

    kind: ClassVar[str] = "gradient"
    contribution: int
    groups: tuple[int, ...]
    samples: tuple[SampleOutcome, ...]
    zero_advantage_groups: int
    loss_sum: float
    denominator: float
    micro_batches: int
    threads: int
    statistics: TokenStatistics


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """The optimizer's cell holds the contribution: it can no longer be lost apart from that cell."""

    kind: ClassVar[str] = "received"
    number: int
    name: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ContributionLost:
    """A contribution is gone before it was received; its groups wait for a gradient again."""

    kind: ClassVar[str] = "gone"
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class AgreementProbed:
    """Before a step: tokens of the current weights that no gradient compares, scored by the trainer."""

    kind: ClassVar[str] = "probe"
    divergence: Divergence


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The optimizer has stepped. `digest` is of the new weights, `weights_id` their name; `metrics` are for readers."""

    kind: ClassVar[str] = "step"
    step: int
    updated: bool
    digest: str
    weights_id: str
    threads: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Published:
    """A cell draws under this version from now on."""

    kind: ClassVar[str] = "publish"
    cell: str
    number: int


@dataclass(frozen=True, slots=True)
class CellLost:
    """A cell's incarnation is gone, with what it was computing."""

    kind: ClassVar[str] = "cell_lost"
    cell: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rebased:
    """From here on the run goes on from the checkpoint that is written next.

    Either recorded steps came out with other bits, and `weights_id` names them; or what led here is not in this
    journal, and `snapshot` is the state at this point.
    """

    kind: ClassVar[str] = "base"
    step: int
    digest: str
    weights_id: str
    snapshot: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class TokensLost:
    """Tokens that were drawn and never recorded: a process died in the unit that drew them."""

    kind: ClassVar[str] = "lost"
    tokens: int


@dataclass(frozen=True, slots=True)
class EvaluationTaken:
    """Held-out reward was measured; the answers are in the run folder. `reward` is None where no task was answered."""

    kind: ClassVar[str] = "evaluation"
    name: str
    step: int
    reward: float | None
    failed: int
    skipped: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The state is about to be saved as the checkpoint of this step."""

    kind: ClassVar[str] = "checkpoint"
    step: int


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run was asked to stop."""

    kind: ClassVar[str] = "stop"
    reason: str


Event = (
    RunStarted
    | GroupAdmitted
    | TurnAppended
    | TokensDrawn
    | TurnEnded
    | WorldAnswered
    | AttemptEnded
    | GroupClosed
    | GroupCommitted
    | ContributionOpened
    | GradientTaken
    | ContributionReceived
    | ContributionLost
    | AgreementProbed
    | StepTaken
    | Published
    | CellLost
    | Rebased
    | TokensLost
    | EvaluationTaken
    | CheckpointWritten
    | RunStopped
)

EVENTS: dict[str, type[Event]] = {kind.kind: kind for kind in get_args(Event)}

FOR_READERS = {
    "start": {"schema", "digest", "resumed", "threads", "fingerprint"},
    "tokens": {"cell"},
    "opened": {"fingerprint"},
    "received": {"name", "digest", "nbytes"},
    "gone": {"reason"},
    "step": {"digest", "threads", "metrics"},
    "publish": {"cell", "number"},
    "cell_lost": {"cell", "incarnation", "reason"},
    "base": {"digest"},
    "evaluation": {"reward", "failed", "skipped"},
    "checkpoint": {"step"},
    "stop": {"reason"},
}
"""Per kind the fields that change nothing in the state: facts for replays, pages and people."""


# The codec


def encode(events: Sequence[Event]) -> tuple[str, str, bytes]:
    """A frame: its kinds joined by "+", its JSON, and its payload."""
    rows = []
    for event in events:
        row = _ENCODERS[type(event)](event)
        row.insert(0, event.kind)
        rows.append(row)
    kinds = "+".join(sorted({event.kind for event in events}))
    payload = b"".join(event.payload or b"" for event in events if isinstance(event, TokensDrawn))
    return kinds, json.dumps(rows, separators=(",", ":")), payload


def decode(
    body: str | bytes, payload: bytes | None = None, kinds: Collection[str] | None = None
) -> Iterator[Event]:
    """The events of a frame; with `kinds` only those.

    Args:
        payload: what `encode` returned; None leaves the events without it.

    Raises:
        ValueError, KeyError, TypeError: it is not a frame of this schema.
    """
    at = 0
    for row in json.loads(body):
        kind = row[0]
        wanted = kinds is None or kind in kinds
        if not wanted and (kind != TokensDrawn.kind or payload is None):
            continue
        event = _DECODERS[kind](row)
        if isinstance(event, TokensDrawn) and payload is not None:
            end = at + event.payload_bytes
            if end > len(payload):
                raise ValueError("a frame's payload is shorter than its tokens")
            event = replace(event, payload=payload[at:end])
            at = end
        if wanted:
            yield event


def kinds_of(body: str | bytes) -> list[str]:
    """The kinds of a frame's events, in their order; no event is made.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is not a frame.
    """
    return [EVENTS[row[0]].kind for row in json.loads(body)]


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _plain(value: Any) -> Any:
    """As JSON holds it: named tuples and nested dataclasses as lists, enums as their values."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Divergence | TokenStatistics):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    return value


def _names(kind: type[Any]) -> list[str]:
    return [f.name for f in fields(kind) if f.name != "payload"]


def _encoder(kind: type[Any]) -> Callable[[Any], list[Any]]:
    names = _names(kind)
    return lambda event: [_plain(getattr(event, name)) for name in names]


def _decoder(kind: type[Any]) -> Callable[[list[Any]], Any]:
    hints = get_type_hints(kind)
    readers = [_reader(hints[name]) for name in _names(kind)]
    width = len(readers) + 1

    def read(row: list[Any]) -> Any:
        if len(row) != width:
            raise ValueError(f"a {kind.__name__} has {width - 1} fields, not {len(row) - 1}")
        return kind(*[reader(value) for reader, value in zip(readers, row[1:], strict=True)])

    return read


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """From JSON to a field of this type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in args if arg is not type(None)]
        reader = _reader(inner[0])
        return lambda value: None if value is None else reader(value)
    if origin is tuple:
        item = _reader(args[0])
        if item is _as_is:
            return tuple
        return lambda value: tuple(map(item, value))
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        readers = [_reader(inner) for inner in get_type_hints(hint).values()]
        if all(reader is _as_is for reader in readers):
            return lambda value: hint(*value)
        return lambda value: hint(*[read(item) for read, item in zip(readers, value, strict=True)])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if isinstance(hint, type) and is_dataclass(hint):
        return hint.from_dict  # type: ignore[attr-defined,no-any-return]
    return _as_is


def _as_is(value: Any) -> Any:
    return value


_ENCODERS = {kind: _encoder(kind) for kind in EVENTS.values()}
_DECODERS = {name: _decoder(kind) for name, kind in EVENTS.items()}
