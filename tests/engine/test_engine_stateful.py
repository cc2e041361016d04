"""Any order of operations on a small, crowded engine keeps its invariants, and every request gets its own tokens."""

from collections import Counter

from engine_cases import (
    CONTEXT,
    Request,
    assert_clean,
    assert_consistent,
    check_request,
    random_prompt,
    step,
    switch,
    tiny_engine,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.types import Sampling

SHARED = random_prompt(70, 11)
PROMPTS = [
    SHARED,
    [*SHARED, 1],
    SHARED + random_prompt(71, 9),
    [*SHARED[:6], 3, 3],
    [9],
    random_prompt(72, 40),
]
SAMPLINGS = [
    Sampling(temperature=0.0, max_tokens=5, ignore_eos=True),
    Sampling(temperature=1.0, max_tokens=16, ignore_eos=True),
    Sampling(temperature=0.8, max_tokens=9, top_k=9, stop=("a", "qq")),
    Sampling(temperature=1.4, max_tokens=200, top_p=0.9),
]
VERSIONS = 3
priorities = st.tuples(st.integers(0, 2))
seen: Counter[str] = Counter()
"""What happened over all runs: an operation that never occurs would test nothing."""


class EngineMachine(RuleBasedStateMachine):
    """Submits, aborts, steps, changes priorities and weights in any order."""

    @initialize(
        max_sequences=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        capacity=st.integers(CONTEXT, CONTEXT + 30),
        cache_tokens=st.sampled_from([0, 8, 25, 1000]),
        block_size=st.integers(2, 6),
        mode=st.sampled_from(["recompute", "keep"]),
    )
    def start(
        self,
        max_sequences: int,
        max_batch_tokens: int,
        capacity: int,
        cache_tokens: int,
        block_size: int,
        mode: str,
    ) -> None:
        self.engine = tiny_engine(
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
            kv_on_update=mode,
        )
        self.engine.cache.capacity_bytes = cache_tokens * self.engine.kv_bytes_per_token
        self.engine.cache.block_size = block_size
        self.requests: dict[object, Request] = {}
        self.aborted: set[object] = set()

    @rule(prompt=st.sampled_from(PROMPTS), sampling=st.sampled_from(SAMPLINGS), priority=priorities)
    def submit(self, prompt: list[int], sampling: Sampling, priority: tuple[int, ...]) -> None:
        number = len(self.requests)
        self.requests[number] = Request(prompt, sampling, key=number)
        self.requests[number].submit(self.engine, number, priority)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        there = self.requests[number].finish_reason is None and number not in self.aborted
        assert self.engine.abort(number) == there
        if there:
            self.aborted.add(number)
            seen["aborted"] += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), priority=priorities)
    def change_priority(self, data: st.DataObject, priority: tuple[int, ...]) -> None:
        self.engine.set_priority(data.draw(st.sampled_from(sorted(self.requests))), priority)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            waited = self.engine.num_unfinished
            computed = sum(s.computed for s in self.engine.scheduler.running)
            events = step(self.engine, self.requests)
            assert self.aborted.isdisjoint(event.request_id for event in events)
            self.sound()
            moved = events or sum(s.computed for s in self.engine.scheduler.running) != computed
            assert moved or not waited, "a step that did nothing"

    @rule(version=st.integers(0, VERSIONS))
    def update(self, version: int) -> None:
        if f"w{version}" == self.engine.weights_id:
            return
        carried = [s for s in self.engine.scheduler.running if s.computed]
        seen["updated while running"] += bool(carried)
        switch(self.engine, version)
        assert self.engine.cache.used_bytes == 0
        if self.engine.config.kv_on_update == "recompute":
            assert self.engine.slots.used == 0
        else:
            assert all(s.mixed for s in carried)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            assert_consistent(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.num_unfinished:
                break
            step(self.engine, self.requests)
        assert_clean(self.engine)
        for number, request in self.requests.items():
            assert (request.finish_reason is None) == (number in self.aborted)
            if not any(request.mixed):
                check_request(request)
            seen["finished"] += number not in self.aborted
            seen["over kept KV"] += any(request.mixed)
            seen["stopped"] += request.finish_reason == "stop"
            seen["over several versions"] += len(set(request.versions)) > 1
        seen["preempted"] += self.engine.scheduler.preemptions
        seen["prefix hits"] += self.engine.cache.hit_tokens


WANTED = (
    "aborted",
    "updated while running",
    "finished",
    "over kept KV",
    "stopped",
    "over several versions",
    "preempted",
    "prefix hits",
)
ROUNDS = 8
"""A round explores at random; further ones follow until everything wanted has happened."""


def test_any_order_of_operations() -> None:
    for _ in range(ROUNDS):
        run_state_machine_as_test(
            EngineMachine,
            settings=settings(
                max_examples=40,
                stateful_step_count=25,
                deadline=None,
                derandomize=False,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
        if all(seen[what] > 0 for what in WANTED):
            break
    for what in WANTED:
        assert seen[what] > 0, f"no run had: {what}"
