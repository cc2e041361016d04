"""The state of a run is the fold of its journal: live, from the start, from a snapshot, and of no field by accident."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from fold_cases import Frames, ToyConversation, config_of, folded, run_toys
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.line.record import Record
from headrace.measures import Divergence, TokenStatistics
from headrace.runs.events import EVENTS, FOR_READERS, Event, TokensDrawn, decode, encode
from headrace.runs.state import RunState
from headrace.schedule import Bucket

chances = hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
runs = given(
    random=st.randoms(use_true_random=False),
    eta=st.integers(0, 2),
    crashes=st.integers(0, 2),
    multi_turn=st.booleans(),
)
Folder = pytest.TempPathFactory


@pytest.fixture(autouse=True)
def toy_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.line.episodes.Conversation", ToyConversation)


@chances
@runs
def test_after_each_event_the_live_state_is_the_fold(
    random: Any, eta: int, crashes: int, multi_turn: bool, tmp_path_factory: Folder
) -> None:
    """What is recorded, read back and applied to another state leads to the same, field by field."""

    def watch(line: Any, frames: Frames) -> None:
        shadow = folded(frames)
        record: Record = line.record
        emit = record.emit

        def watched(event: Event) -> None:
            emit(event)
            kinds, body, payload = encode([event])
            (read,) = decode(body, payload)
            assert read == event
            assert kinds == event.kind
            shadow.apply(read)
            assert shadow.to_dict() == record.state.to_dict()

        record.emit = watched  # type: ignore[method-assign]

    run_toys(
        config_of(eta, 2, steps=3), random, tmp_path_factory.getbasetemp(), crashes,
        multi_turn=multi_turn, watch=watch,
    )  # fmt: skip


@chances
@runs
def test_a_fold_from_a_snapshot_is_the_fold_from_the_start(
    random: Any, eta: int, crashes: int, multi_turn: bool, tmp_path_factory: Folder
) -> None:
    frames = run_toys(
        config_of(eta, 2, steps=3), random, tmp_path_factory.getbasetemp(), crashes, multi_turn=multi_turn
    )
    events = list(frames.events())
    at = random.randrange(len(events))
    whole, part = RunState(), RunState()
    for event in events[:at]:
        whole.apply(event)
    part.load(json.loads(json.dumps(whole.to_dict())))
    assert part.to_dict() == whole.to_dict()
    for event in events[at:]:
        whole.apply(event)
        part.apply(event)
    assert part.to_dict() == whole.to_dict()


@chances
@runs
def test_without_the_tokens_only_the_tokens_are_missing(
    random: Any, eta: int, crashes: int, multi_turn: bool, tmp_path_factory: Folder
) -> None:
    frames = run_toys(
        config_of(eta, 2, steps=3), random, tmp_path_factory.getbasetemp(), crashes, multi_turn=multi_turn
    )
    whole, hollow = RunState(), RunState()
    for event in frames.events():
        whole.apply(event)
        hollow.apply(replace(event, payload=None) if isinstance(event, TokensDrawn) else event)
        assert without_tokens(hollow) == without_tokens(whole)


def without_tokens(state: RunState) -> Any:
    data = state.to_dict()
    for group in data["groups"]:
        for attempt in group["attempts"]:
            for row in [] if attempt is None else [attempt["trajectory"], *attempt["trajectory"]["earlier"]]:
                for name in ("token_ids", "sampled", "logprobs", "versions"):
                    row.pop(name, None)
    return data


# Every field counts

OTHER: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 1.5,
    str: lambda value: value + "x",
    Bucket: lambda value: Bucket.DROPPED_STALE if value is not Bucket.DROPPED_STALE else Bucket.MASKED,
    dict: lambda value: (
        value | ({"line": value["line"] | {"steps": 9}} if "line" in value else {"another": 1})
    ),
    list: lambda value: [*value, 1],
    type(None): lambda value: 1.0,
    bytes: lambda value: bytes([value[0] ^ 1, *value[1:]]),
    Divergence: lambda value: Divergence(tokens=value.tokens + 1, ratio_sum=1.0, ratio_square_sum=1.0),
    TokenStatistics: lambda value: TokenStatistics(aged=value.aged + 1),
}


def another(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._replace(**{value._fields[0]: another(value[0])})
    if isinstance(value, tuple):
        return (*value[:-1], another(value[-1])) if value else (1,)
    return OTHER[type(value)](value)


def tells(state: RunState, before: dict[str, Any], event: Event, changed: Event) -> bool:
    """Whether the state is another after the changed event, or refuses it."""
    try:
        other = RunState.from_dict(before)
        other.apply(changed)
    except (ValueError, RuntimeError, KeyError, IndexError, AttributeError, TypeError):
        return True
    return other.to_dict() != state.to_dict()


def test_every_field_changes_the_state_or_is_for_readers(tmp_path: Path) -> None:
    import random

    seen: dict[str, set[str]] = {kind: set() for kind in EVENTS}
    told: dict[str, set[str]] = {kind: set() for kind in EVENTS}
    for seed in range(6):
        frames = run_toys(config_of(1, 2, steps=3), random.Random(seed), tmp_path, crashes=2, multi_turn=True)
        state = RunState()
        for event in frames.events():
            before = state.to_dict()
            before = json.loads(json.dumps(before))
            state.apply(event)
            for name in (field.name for field in fields(event)):
                value = getattr(event, name)
                seen[event.kind].add(name)
                if name in told[event.kind]:
                    continue
                if tells(state, before, event, replace(event, **{name: another(value)})):
                    told[event.kind].add(name)
    silent = {kind: seen[kind] - told[kind] for kind in EVENTS}
    quiet = {kind: names for kind, names in silent.items() if names - FOR_READERS.get(kind, set())}
    assert not quiet, "facts that nothing depends on"
    useful = {k: FOR_READERS[k] & told[k] for k in FOR_READERS if FOR_READERS[k] & told[k]}
    assert not useful, "on the list of facts for readers, and yet the state depends on them"


def test_the_codec_refuses_what_is_no_frame() -> None:
    for body in ('[["admit",1]]', '[["nothing"]]', "{", '[["tokens","c",0,[[[0,0,0],1,false]],false]]'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            list(decode(body))
