"""A line of plain data: cells that answer late, out of order and twice, or die; an environment without processes.

The real loop (`line/line.py`), episodes, rollouts, record, planner and state run over them. There is no model: a token
is a number, a gradient is the list of its groups. Everything that is left to chance is drawn from one `choose(n)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from line_cases import settings

from headrace import Observer
from headrace.config import Config
from headrace.environments import Observation, WorldReply
from headrace.line.episodes import Episodes
from headrace.line.line import ProductionLine
from headrace.line.loading import Loader
from headrace.line.record import Record
from headrace.line.resume import give_up_contributions
from headrace.line.rollouts import Rollouts
from headrace.measures import Divergence, SampleOutcome, TokenStatistics
from headrace.runs import events as happened
from headrace.runs.events import SCHEMA, Event, GroupAdmitted, RunStarted, decode
from headrace.runs.state import RunState
from headrace.schedule import Bucket
from headrace.schedule.units import (
    Assignment,
    CellView,
    Contribute,
    Contributed,
    Decode,
    Decoded,
    Died,
    Drawn,
    Gradient,
    GradientDone,
    Handle,
    OptimizerStep,
    Outcome,
    Publish,
    Request,
    Score,
    Scored,
    Stepped,
    Taken,
)
from headrace.types import Sampling

Choose = Callable[[int], int]
"""A number below the given one."""


class Frames:
    """A journal in memory: what was committed, and nothing else."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, str, bytes]] = []
        self._pending: list[tuple[str, str, bytes]] = []

    def record(self, kind: str, body: str, payload: bytes) -> None:
        self._pending.append((kind, body, payload))

    def commit(self) -> None:
        self.frames += self._pending
        self._pending = []

    def events(self, payloads: bool = True) -> Iterator[Event]:
        for _, body, payload in self.frames:
            yield from decode(body, payload if payloads else None)


def folded(frames: Frames, payloads: bool = True) -> RunState:
    """The state that a journal's events lead to."""
    state = RunState()
    for event in frames.events(payloads):
        state.apply(event)
    return state


@dataclass
class Shop:
    """What is true outside the line: which groups were trained, by which step.

    `optimizer` holds the contributions that were received for the step under way: number -> groups.
    """

    trained: dict[int, int] = field(default_factory=dict)
    drawn: int = 0
    optimizer: dict[int, list[int]] = field(default_factory=dict)


class ToyCell:
    """A cell of plain data that dies, lags, and answers as `choose` says.

    Args:
        mortal: whether it may die; the one with the optimizer may not.
    """

    def __init__(
        self, name: str, shop: Shop, choose: Choose, *, optimizer: bool, mortal: bool, number: int
    ) -> None:
        self.name, self.shop, self.choose = name, shop, choose
        self.optimizer, self.mortal = optimizer, mortal
        self.incarnation = 0
        self.number = number
        self.queue: list[Assignment] = []
        self.requests: dict[Any, Request] = {}
        self.sampled: dict[Any, int] = {}
        self.sums: dict[int, list[int]] = {}
        self.contribution: int | None = None
        self.said: list[Outcome] = []

    @property
    def view(self) -> CellView:
        return CellView(
            self.name, self.incarnation, self.number, self.optimizer, 0, self.contribution, depth=2
        )

    def counters(self) -> dict[str, int]:
        return {}

    def start(self, assignment: Assignment) -> None:
        assert assignment.incarnation == self.incarnation
        self.queue.append(assignment)

    def wait(self, timeout_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if self.said and self.choose(6) == 0:  # something it said before, once more
            outcomes.append(self.said[self.choose(len(self.said))])
        if self.queue and self.mortal and self.choose(12) == 0:
            outcomes += self.die()
        elif self.queue and self.choose(4):
            outcomes.append(self.run(self.queue.pop(0)))
            self.said = [*self.said, outcomes[-1]][-4:]
        if len(outcomes) > 1 and self.choose(2):
            outcomes.reverse()
        return outcomes

    def die(self) -> list[Outcome]:
        """In mid-unit: something was drawn that nobody will hear of; the next incarnation knows nothing."""
        unit = self.queue[0]
        drawn = 0
        if isinstance(unit.unit, Decode) and self.requests:
            drawn = self.choose(3)
            self.shop.drawn += drawn
        gone = Outcome(unit.number, self.name, self.incarnation, Died("killed", drawn))
        late = self.run(unit) if self.choose(2) else None
        if isinstance(unit.unit, Decode) and late is not None:
            self.shop.drawn -= sum(len(one.ids) for one in late.result.drawn)  # type: ignore[union-attr]
        self.incarnation += 1
        self.queue, self.requests, self.sampled, self.sums, self.contribution = [], {}, {}, {}, None
        if late is not None:
            self.said.append(late)
        return [gone]

    def run(self, assignment: Assignment) -> Outcome:
        unit: Any = assignment.unit
        return Outcome(assignment.number, self.name, assignment.incarnation, self._run(unit), 0.01)

    def _run(self, unit: Any) -> Any:
        match unit:
            case Decode():
                return self._decode(unit)
            case Gradient():
                assert unit.version == self.number, "a gradient names its exact version"
                if unit.contribution not in self.sums:
                    self.sums[unit.contribution] = []
                self.contribution = unit.contribution
                self.sums[unit.contribution] += unit.groups
                return GradientDone(toy_result(unit), 1)
            case Score():
                return Scored(Divergence())
            case Contribute():
                self.contribution = None
                self.shop.optimizer[unit.contribution] = self.sums.pop(unit.contribution, [])
                return Contributed(Handle(f"{self.name}/{unit.contribution}", "", 0))
            case OptimizerStep():
                step = unit.version + 1
                for number in unit.contributions:
                    for group in self.shop.optimizer.pop(number):
                        assert group not in self.shop.trained, f"group {group} was trained twice"
                        self.shop.trained[group] = step
                return Stepped(True, f"digest {step}", f"weights {step}", 0.0, 1.0, 1e-3, 1)
            case Publish():
                self.number = unit.policy.number
                return Taken(unit.policy.number)
        raise AssertionError(unit)

    def _decode(self, unit: Decode) -> Decoded:
        for request in unit.requests:
            assert request.id not in self.requests
            self.requests[request.id] = request
            self.sampled[request.id] = len(request.token_ids) - request.prompt_length
        drawn = []
        for key, request in list(self.requests.items()):
            length = 1 + request.random_key % request.sampling.max_tokens
            count = min(1 + self.choose(unit.steps + 1), length - self.sampled[key])
            if count <= 0:
                continue
            begin = self.sampled[key]
            self.sampled[key] += count
            done = self.sampled[key] == length
            ids = [(request.random_key + begin + i) % 100 for i in range(count)]
            drawn.append(Drawn(key, ids, [-0.5] * count, False, "stop" if done else None))
            self.shop.drawn += count
            if done:
                del self.requests[key]
        return Decoded(self.number, tuple(drawn), ())


def toy_result(unit: Gradient) -> Any:
    samples = []
    for members in unit.members:
        rewards = {t.reward for t in members}
        for t in members:
            bucket = Bucket.TRAINED if len(rewards) > 1 else Bucket.ZERO_ADVANTAGE
            samples.append(SampleOutcome(t.id, bucket, t.num_sampled, 0.5 if len(rewards) > 1 else 0.0))
            for version in (v for row in t.rows for v, s in zip(row.versions, row.sampled, strict=True) if s):
                assert 0 <= unit.version - version <= unit.max_staleness, "the bound on staleness"
    return SimpleNamespace(
        samples=samples,
        zero_advantage_groups=0,
        loss_sum=0.0,
        denominator=1.0,
        micro_batches=1,
        statistics=TokenStatistics(),
    )


class ToyTokenizer:
    """Each token is a letter; the chat template is the messages, one after another."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class ToyPool:
    """Answers in the order and at the times that `choose` picks; a few attempts fail."""

    failures_left = 3

    multi_turn = False
    free_places = None

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.requests: list[Any] = []

    def submit(self, key: Any, task: Any, completion: str) -> None:
        assert key not in self.requests
        self.requests.append(key)

    def drop(self, key: Any) -> None:
        self.requests = [request for request in self.requests if request != key]

    def poll(self) -> list[WorldReply]:
        return [self._answer(self.choose(len(self.requests)))] if self.requests and self.choose(3) else []

    def wait(self, timeout_s: float) -> list[WorldReply]:
        return [self._answer(self.choose(len(self.requests)))] if self.requests else []

    def take_reports(self) -> list[str]:
        return []

    def _answer(self, index: int) -> WorldReply:
        key = self.requests.pop(index)
        if self.failures_left and self.choose(10) == 0:
            self.failures_left -= 1
            return WorldReply(key, None, "it failed", seconds=0.1)
        return WorldReply(key, float(sum(key) % 2), None, seconds=0.1)


class ToyWorlds(ToyPool):
    """Conversations: each episode answers a few turns, and can be put back where it was."""

    multi_turn = True

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.live: dict[Any, int] = {}

    def reset(self, key: Any, task: Any) -> None:
        assert key not in self.live
        self.live[key] = 0
        self.requests.append(key)

    def step(self, key: Any, action: Any) -> None:
        assert key in self.live
        assert key not in self.requests
        self.live[key] += 1
        self.requests.append(key)

    def resume(self, key: Any, task: Any, actions: Any, replies: Any, snapshot: Any = None) -> None:
        assert key not in self.live
        assert len(actions) <= len(replies) <= len(actions) + 1
        assert snapshot == (["turn", len(replies) - 1] if replies else None)
        self.live[key] = len(actions)
        if len(actions) == len(replies):
            self.requests.append(key)

    def drop(self, key: Any) -> None:
        super().drop(key)
        self.live.pop(key, None)

    def _answer(self, index: int) -> WorldReply:
        key = self.requests.pop(index)
        turn = self.live[key]
        if self.failures_left and self.choose(12) == 0:
            self.failures_left -= 1
            del self.live[key]
            return WorldReply(key, None, "it failed", seconds=0.1)
        done = turn >= 1 + sum(key) % 3
        if done:
            del self.live[key]
        return WorldReply(
            key,
            float(turn and sum(key) % 2),
            None,
            None if done else observation(f"turn {turn} of {key}"),
            done,
            {"turn": turn},
            ["turn", turn],
            0.1,
        )


class ToyConversation:
    """Rows of small numbers; now and then a new row begins."""

    def __init__(self, tokenizer: Any, messages: Any, tools: Any = (), *, stop_token_ids: Any = ()) -> None:
        self.messages, self.tools = [dict(message) for message in messages], [dict(tool) for tool in tools]

    @property
    def prompt_ids(self) -> list[int]:
        return [len(message.get("content", "")) for message in self.messages]

    def parse(self, sampled: Any, text: str = "") -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def extend(self, sampled: Any, message: Any, new: Any) -> Any:
        self.messages = [*self.messages, dict(message), *map(dict, new)]
        split = len(sampled) % 3 == 0
        ids = self.prompt_ids if split else [7, len(self.messages)]
        return SimpleNamespace(ids=ids, split=split, reason="three tokens" if split else "")

    def to_dict(self) -> dict[str, Any]:
        return {"messages": self.messages, "tools": self.tools}

    @classmethod
    def from_dict(cls, tokenizer: Any, data: Any, *, stop_token_ids: Any = ()) -> ToyConversation:
        return cls(tokenizer, data["messages"], data["tools"])


class ToyAccount:
    """Measures nothing."""

    how_to_go_on = "go on"

    def __init__(self) -> None:
        from collections import defaultdict

        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def booked(self, name: str) -> Iterator[None]:
        yield

    def status(self, line: Any, units: Any) -> None:
        return None

    def close_step(self, state: RunState, stepped: Stepped, cells: Any) -> dict[str, Any]:
        return {"step": state.version + 1}


class ToyIntake:
    def next(self, state: RunState) -> GroupAdmitted:
        prompt = () if state.multi_turn else tuple(range(1, 4 + state.next_group % 3))
        return GroupAdmitted(
            state.next_group, {"prompt": f"task {state.next_task}"}, prompt, state.next_task + 1, 0
        )


def toy_line(
    config: Config,
    frames: Frames,
    shop: Shop,
    choose: Choose,
    folder: Path,
    *,
    cells: int = 3,
    observer: Observer | None = None,
    stopping: Callable[[], bool] = lambda: False,
    multi_turn: bool = False,
) -> ProductionLine:
    """A line over these cells, taken up from what the journal holds."""
    state = folded(frames)
    record = Record(frames, state)  # type: ignore[arg-type]
    weights_id, number = (state.policy.weights_id or "weights 0"), state.version
    record.emit(
        RunStarted(
            SCHEMA, config.to_dict(), number, weights_id, "digest", bool(frames.frames), multi_turn, 1, "toy"
        )
    )
    give_up_contributions(record, "", 0)
    lost = shop.drawn - state.ledger.generated
    if lost:
        record.emit(happened.TokensLost(lost))
    record.commit()
    # What the optimizer had received is taken again from the journal.
    shop.optimizer = {number: list(c.groups) for number, c in state.contributions.items()}
    model = SimpleNamespace(tokenizer=ToyTokenizer(), eos_token_ids=frozenset())
    episodes = Episodes(
        state,
        model,
        10_000,
        Sampling(max_tokens=config.sampling.max_tokens),
        config.environment.max_attempts,  # type: ignore[arg-type]
    )
    pool: Any = ToyWorlds(choose) if multi_turn else ToyPool(choose)
    rollouts = Rollouts(record, episodes, pool, lambda text: None)
    toys: dict[str, Any] = {
        f"cell-{i}": ToyCell(f"cell-{i}", shop, choose, optimizer=i == 0, mortal=i > 0, number=number)
        for i in range(cells)
    }
    account: Any = ToyAccount()
    intake: Any = ToyIntake()
    line = ProductionLine(
        record,
        toys,
        rollouts,
        intake,
        Loader(state, folder),
        account,
        pool,
        observer or Observer(),
        lambda: None,
        stopping,
    )
    rollouts.take_up()
    return line


def observation(text: str) -> Observation:
    return Observation([{"role": "user", "content": text}])


TURNS = 4000
"""More than any run here takes; one that takes more makes no progress."""


def config_of(eta: int, groups: int, steps: int = 4) -> Any:
    return settings(
        line={"max_staleness": eta, "groups_per_step": groups, "steps": steps},
        algorithm={"group_size": 2},
        sampling={"max_tokens": 6},
        trainer={"micro_batch_tokens": 12},
    )


def run_toys(
    config: Any,
    random: Any,
    folder: Path,
    crashes: int = 0,
    *,
    multi_turn: bool = False,
    watch: Callable[[Any, Frames], None] = lambda line, frames: None,
) -> Frames:
    """A whole run, taken up again after each crash."""
    frames, shop = Frames(), Shop()
    for life in range(crashes + 1):
        left = random.randrange(5, 60) if life < crashes else TURNS
        line = toy_line(config, frames, shop, random.randrange, folder, multi_turn=multi_turn)
        watch(line, frames)
        while not line.state.admission.finished and left:
            line.turn()
            left -= 1
        if line.state.admission.finished:
            break
    state = folded(frames)
    assert state.admission is not None
    assert state.admission.finished, "no progress"
    steps, groups = config.line.steps, config.line.groups_per_step
    assert sorted(shop.trained.values()) == [s for s in range(1, steps + 1) for _ in range(groups)]
    assert state.ledger.in_flight == state.in_flight() == 0
    assert state.ledger.generated == shop.drawn
    return frames
