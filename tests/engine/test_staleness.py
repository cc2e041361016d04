"""An adversary against KV of other weights: two runs share host memory and disk, and their version numbers coincide.

It updates weights between any two steps, starts and restarts engines, drops KV from tiers, and keeps sessions going at
different versions. Every token that the engine does not label is compared with a plain forward of the weights that were
in force when it was made: no cache, no engine.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_cases import (
    CONTEXT,
    Request,
    assert_clean,
    assert_consistent,
    plain_draw,
    plain_logprob,
    random_prompt,
    reference_logits,
    reference_module,
    set_version,
    tiny_model,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine import kv as engine_kv
from headrace.engine.sampler import uniform
from headrace.state.tiers import segment as segment_module
from headrace.state.tiers.base import DEVICE, HOST
from headrace.state.weights import content_digest, mint
from headrace.types import Sampling

RUNS = st.integers(0, 1)
SESSIONS = 3
TOKENS = 4
DEVICE_TOKENS = 24

Identify = Callable[[Engine, int], str]


def by_publish(engine: Engine, version: int) -> str:
    """A name as the trainer gives one: version 0 by content, later ones fresh."""
    return mint() if version else content_digest(engine.model.module)


@dataclass
class Run:
    """One run's engine, and which weights it has: `contents` says it for each label."""

    name: int
    engine: Engine
    contents: int = 0
    requests: dict[Any, Request] = field(default_factory=dict)
    truth: dict[Any, list[int]] = field(default_factory=dict)


class Adversary(RuleBasedStateMachine):
    """`checked` counts tokens, `reused` those that came from kept KV, over all examples."""

    identify: Identify = staticmethod(by_publish)
    checked = 0
    reused = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        (self.folder / "memory").mkdir()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(segment_module, "memory_folder", lambda: self.folder / "memory")
        self.patch.setattr(engine_kv, "BLOCK_TOKENS", 4)
        self.count = 0
        self.contents = 0

    def teardown(self) -> None:
        try:
            for run in getattr(self, "runs", ()):
                self._finish(run)
                assert_clean(run.engine)
                run.engine.close()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)

    @initialize(keep=st.booleans(), evict=st.sampled_from(["cost", "lru"]), chunk=st.integers(5, 40))
    def start(self, keep: bool, evict: str, chunk: int) -> None:
        self.config = EngineConfig(
            context_length=CONTEXT,
            max_sequences=4,
            max_batch_tokens=chunk,
            prefix_cache_mb=1,
            kv_host_mb=1,
            kv_disk_mb=4,
            kv_disk_folder=str(self.folder / "kv"),
            kv_evict=evict,
            kv_on_update="keep" if keep else "recompute",
        )
        # What every session says first is the same in both runs, so that each may meet the other's blocks.
        self.sessions = [[random_prompt(i, 9) for i in range(SESSIONS)] for _ in range(2)]
        self.runs = [Run(name, self._engine()) for name in range(2)]

    @rule(
        run=RUNS,
        sessions=st.lists(st.integers(0, SESSIONS - 1), min_size=1, max_size=SESSIONS, unique=True),
        said=st.integers(1, 6),
        then=st.integers(0, 12),
    )
    def turns(self, run: int, sessions: list[int], said: int, then: int) -> None:
        """Sessions go on from where they are, unless their last turn is under way; `then` steps follow."""
        mine = self.runs[run]
        under_way = {key[0] for key, request in mine.requests.items() if not request.finish_reason}
        for session in set(sessions) - under_way:
            self.count += 1
            prompt = [*self.sessions[run][session], *random_prompt(1000 + session, said)]
            if len(prompt) + TOKENS >= CONTEXT:
                prompt = random_prompt(session, 9)
            request = Request(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True), self.count)
            key = (session, self.count)
            mine.engine.submit(key, prompt, request.sampling, random_key=self.count, keep_kv=True)
            mine.requests[key], mine.truth[key] = request, []
        self.steps(run, then)

    @rule(run=RUNS, count=st.integers(1, 7))
    def steps(self, run: int, count: int) -> None:
        for _ in range(count):
            self._step(self.runs[run])

    @rule(run=RUNS)
    def update(self, run: int) -> None:
        """The next version; its number is the other run's too, its weights are its own."""
        mine = self.runs[run]
        self.contents += 1
        self._switch(mine, mine.engine.version + 1, self.contents)

    @rule(run=RUNS, kept=st.booleans(), back=st.booleans())
    def restart(self, run: int, kept: bool, back: bool) -> None:
        """A new process goes on at the same version number, with the same weights or (`back`) with others.

        Args:
            kept: the old one ended in order and put its KV on the disk; else it was killed.
        """
        mine = self.runs[run]
        old = mine.engine
        if kept:
            self._finish(mine)
            old.close()
        else:
            self._check(mine)
        version, weights_id, contents = old.version, old.weights_id, mine.contents
        self.runs[run] = mine = Run(run, self._engine())
        if version and back:
            self.contents += 1
            self._switch(mine, version, self.contents)
        elif version:
            set_version(mine.engine.model.module, contents)
            mine.engine.update_weights(version, weights_id)
            mine.contents = contents

    @rule(run=RUNS, tier=st.sampled_from([DEVICE, HOST]))
    def evict(self, run: int, tier: str) -> None:
        self.runs[run].engine.directory.evict(tier, 1 << 30)

    @rule(run=RUNS, session=st.integers(0, SESSIONS - 1))
    def expect(self, run: int, session: int) -> None:
        self.runs[run].engine.expect(self.sessions[run][session], 0.0)
        self.runs[run].engine.tick()

    @invariant()
    def consistent(self) -> None:
        for run in getattr(self, "runs", ()):
            assert_consistent(run.engine)

    def _engine(self) -> Engine:
        model = tiny_model()
        engine = Engine(model, self.config, content_digest(model.module), kv_shared_name="shared")
        engine.cache.capacity_bytes = DEVICE_TOKENS * engine.kv_bytes_per_token
        return engine

    def _switch(self, run: Run, version: int, contents: int) -> None:
        set_version(run.engine.model.module, contents)
        run.engine.update_weights(version, type(self).identify(run.engine, version))
        run.contents = contents

    def _step(self, run: Run) -> None:
        for event in run.engine.step():
            request = run.requests[event.request_id]
            request.record(event)
            run.truth[event.request_id].append(run.contents)
            if request.finish_reason:
                self.sessions[run.name][event.request_id[0]] = [*request.prompt, *request.token_ids]

    def _finish(self, run: Run) -> None:
        while run.engine.num_unfinished:
            self._step(run)
        self._check(run)

    def _check(self, run: Run) -> None:
        for key, request in run.requests.items():
            sequence, truth = request.prompt + request.token_ids, run.truth[key]
            logits = {c: reference_logits(reference_module(c), sequence) for c in set(truth)}
            for i, (token, contents) in enumerate(zip(request.token_ids, truth, strict=True)):
                if request.mixed[i]:
                    assert self.config.kv_on_update == "keep"
                    continue
                position = len(request.prompt) + i
                row = logits[contents][position - 1]
                assert token == plain_draw(row, request.sampling, uniform(request.key, position))
                assert abs(request.logprobs[i] - plain_logprob(row, request.sampling, token)) < 1e-9
                Adversary.checked += 1
        run.requests.clear()
        Adversary.reused += run.engine.cache.hit_tokens
        run.engine.cache.hit_tokens = 0


def test_no_token_comes_from_kv_of_other_weights() -> None:
    Adversary.checked = Adversary.reused = 0
    for _ in range(8):
        run_state_machine_as_test(
            Adversary,
            settings=settings(
                max_examples=25,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        # Some draws are short of sessions: it goes on until it has seen enough.
        if min(Adversary.checked, Adversary.reused) > 300:
            break
    assert Adversary.checked > 300
    assert Adversary.reused > 300


class ByNumber(Adversary):
    """What would go wrong if version numbers were names."""

    identify = staticmethod(lambda _, version: f"version-{version}")


@pytest.mark.parametrize("adversary", [Adversary, ByNumber])
def test_the_adversary_finds_a_name_that_two_runs_share(adversary: type[Adversary]) -> None:
    attack = adversary()
    attack.start(keep=False, evict="cost", chunk=40)
    for run in range(2):
        attack.update(run)
        attack.turns(run, list(range(SESSIONS)), said=3, then=12)
        if not run:
            attack.restart(run, kept=True, back=False)
    if adversary is Adversary:
        attack.teardown()
    else:
        with pytest.raises(AssertionError):
            attack.teardown()
