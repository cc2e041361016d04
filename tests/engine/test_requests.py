"""Requests: what is refused, what aborting leaves, who goes first, and that everybody's turn comes."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from engine_cases import (
    CONTEXT,
    Request,
    assert_clean,
    assert_consistent,
    check_request,
    random_prompt,
    record_plans,
    run,
    small_blocks,
    step,
    tiny_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import Engine
from headrace.errors import NonFiniteError, UserError
from headrace.types import Sampling

LONG = Sampling(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "at least one token"),
            ([1] * CONTEXT, f"{CONTEXT} tokens does not leave room"),
            ([1, 2, 259], "outside the vocabulary of 259"),
            ([-1], "outside the vocabulary"),
        ],
    )
    def test_submit_refuses(self, engine: Engine, prompt: list[int], message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            engine.submit("a", prompt, Sampling(stop=("x",)))
        assert "\n" not in str(caught.value)
        assert_clean(engine)

    def test_an_id_that_is_running(self, engine: Engine) -> None:
        engine.submit("a", [1], LONG)
        for _ in range(2):
            with pytest.raises(UserError, match="'a' is already running"):
                engine.submit("a", [2], LONG)
            engine.step()
        engine.abort("a")
        engine.submit("a", [1], LONG)
        engine.abort("a")
        assert_clean(engine)

    @pytest.mark.parametrize("length", [0, -1, 4])
    def test_a_prompt_length_that_cannot_be(self, engine: Engine, length: int) -> None:
        with pytest.raises(UserError, match="prompt_length"):
            engine.submit("a", [1, 2, 3], Sampling(), prompt_length=length)
        assert_clean(engine)

    def test_generate_runs_nothing_when_one_prompt_is_bad(self, engine: Engine) -> None:
        for bad in ([1] * CONTEXT, [], "", [300], 5, [{"content": "no role"}]):
            with pytest.raises(UserError):
                engine.generate([[1, 2], bad])  # type: ignore[list-item]
            assert_clean(engine)

    def test_impossible_settings(self) -> None:
        with pytest.raises(UserError, match="more than the model's 1024"):
            tiny_engine(context_length=2000)
        with pytest.raises(UserError, match=r"too little memory for KV: engine\.kv_memory_mb = 100000000"):
            tiny_engine(kv_memory_mb=100_000_000)
        with pytest.raises(UserError, match=r"too little memory for KV.*context_length"):
            tiny_engine(context_length=1024, kv_memory_mb=1)
        with pytest.raises(UserError, match=r"engine settings: .*max_sequences") as caught:
            Engine.load("tiny-random", max_sequences=0)
        assert "\n" not in str(caught.value)

    def test_more_sequences_than_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**20))
        with pytest.raises(
            UserError, match=r"too little memory for KV: 64 sequences of 1024 tokens take \d+ MB"
        ):
            tiny_engine(context_length=1024, max_sequences=64)
        # Within an explicit budget, and with a context of the engine's choice, sequences take turns.
        assert (
            tiny_engine(context_length=1024, max_sequences=64, kv_memory_mb=4).slots.capacity_tokens
            < 64 * 1024
        )
        assert tiny_engine(context_length=None, max_sequences=64).slots.capacity_tokens < 64 * 1024

    def test_an_idle_engine_steps_to_nothing(self, engine: Engine) -> None:
        assert engine.step() == []

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_broken_weights_are_an_error_and_no_token(self, temperature: float) -> None:
        """A NaN in one request stops the step; no other one got a token that nobody was told of."""
        engine = tiny_engine()
        sampling = Sampling(temperature=temperature, max_tokens=9, ignore_eos=True)
        made = {i: Request([10 + i] * 5, sampling, key=i) for i in range(3)}
        for i, request in made.items():
            request.submit(engine, i)
        step(engine, made)
        with torch.no_grad():
            engine.model.module.model.embed_tokens.weight[12] = float("nan")
        engine.update_weights(1, "broken")
        with pytest.raises(NonFiniteError, match=r"request 2: .* token 6 .*version 1") as caught:
            step(engine, made)
        assert caught.value.trajectories == (2,)
        for sequence in engine.scheduler.running:
            request = made[sequence.request_id]
            assert sequence.token_ids == request.prompt + request.token_ids
        for i in made:
            assert engine.abort(i)
        assert_clean(engine)


class TestAbort:
    def test_an_unknown_request(self, engine: Engine) -> None:
        assert not engine.abort("nobody")
        engine.set_priority("nobody", (1,))

    @given(
        steps=st.lists(st.integers(0, 6), min_size=1, max_size=8),
        victims=st.permutations(range(8)),
        max_batch_tokens=st.integers(1, 20),
        capacity=st.integers(CONTEXT, 3 * CONTEXT),
    )
    @settings(max_examples=15, deadline=None)
    def test_in_the_middle_of_everything(
        self, steps: list[int], victims: list[int], max_batch_tokens: int, capacity: int
    ) -> None:
        """Waiting, half prefilled, decoding, preempted: the others go on as if nothing had happened."""
        engine = small_blocks(tiny_engine(max_batch_tokens=max_batch_tokens, capacity=capacity))
        shared = random_prompt(30, 12)
        made = {
            i: Request((shared if i % 2 else []) + random_prompt(i, 4 + i), LONG, key=i) for i in range(8)
        }
        for i, request in made.items():
            request.submit(engine, i)
        aborted = set()
        for count, victim in zip(steps, victims, strict=False):
            for _ in range(count):
                step(engine, made)
            there = made[victim].finish_reason is None
            assert engine.abort(victim) == there
            if there:
                aborted.add(victim)
            assert_consistent(engine)
        run(engine, made)
        for i, request in made.items():
            if i in aborted:
                assert request.finish_reason is None
            else:
                assert request.finish_reason == "length"
            check_request(request)

    def test_everything(self) -> None:
        engine = tiny_engine(max_batch_tokens=6, capacity=CONTEXT)
        for i in range(8):
            engine.submit(i, random_prompt(i, 20), Sampling(max_tokens=30, stop=("never",)))
        for _ in range(9):
            engine.step()
        for i in range(8):
            engine.abort(i)
        assert_clean(engine)
        assert engine.step() == []

    def test_an_interrupted_generate_leaves_nothing(self) -> None:
        engine = tiny_engine()
        run_plan = engine.runner.run
        calls = 0

        def interrupted(plan, slots):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt
            return run_plan(plan, slots)

        engine.runner.run = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.generate([random_prompt(i, 9) for i in range(6)], LONG)
        assert_clean(engine)


class TestOrder:
    def test_arrival_decides_between_equals(self) -> None:
        engine = tiny_engine(max_sequences=2)
        made = {
            i: Request(random_prompt(i, 5), Sampling(max_tokens=6, ignore_eos=True), key=i) for i in range(6)
        }
        for i, request in made.items():
            request.submit(engine, i)
        assert _order_of_ending(engine, made) == [0, 1, 2, 3, 4, 5]

    def test_the_urgent_overtakes(self) -> None:
        engine = tiny_engine(max_sequences=2)
        made = {
            i: Request(random_prompt(i, 5), Sampling(max_tokens=6, ignore_eos=True), key=i) for i in range(6)
        }
        for i, request in made.items():
            request.submit(engine, i, priority=(0, -i) if i >= 4 else (1, 0))
        assert _order_of_ending(engine, made) == [5, 4, 0, 1, 2, 3]

    def test_a_priority_may_change_while_it_waits(self) -> None:
        engine = tiny_engine(max_sequences=1)
        made = {
            i: Request(random_prompt(i, 5), Sampling(max_tokens=4, ignore_eos=True), key=i) for i in range(4)
        }
        for i, request in made.items():
            request.submit(engine, i, priority=(1,))
        step(engine, made)
        engine.set_priority(3, (0,))
        engine.set_priority(1, (2,))
        assert _order_of_ending(engine, made) == [0, 3, 2, 1]

    def test_pressure_preempts_the_least_urgent(self) -> None:
        """The urgent ones end without a break, though they are the youngest."""
        engine = tiny_engine(max_sequences=3, capacity=CONTEXT, max_batch_tokens=64)
        made = {
            i: Request(random_prompt(i, 10), Sampling(max_tokens=24, ignore_eos=True), key=i)
            for i in range(3)
        }
        for i, request in made.items():
            request.submit(engine, i, priority=(-i,))
        ended = _order_of_ending(engine, made)
        assert engine.scheduler.preemptions > 0
        assert ended == [2, 1, 0]
        for request in made.values():
            check_request(request)

    def test_the_urgent_is_prefilled_first(self) -> None:
        """Within the token budget of one step."""
        engine = tiny_engine(max_sequences=4, max_batch_tokens=8, prefix_cache_mb=0)
        plans = record_plans(engine)
        for i in range(3):
            engine.submit(i, random_prompt(i, 12), LONG, priority=(2 - i,))
        engine.step()
        engine.step()
        first, second = ([(s.request_id, n) for s, n in plan.chunks] for plan in plans)
        assert first == [(2, 8)]
        assert second == [(2, 4), (1, 4)]
        for i in range(3):
            engine.abort(i)

    def test_a_long_prompt_does_not_starve(self) -> None:
        """Short requests keep coming; the long one, for which there is no room yet, is not overtaken for ever."""
        engine = tiny_engine(max_sequences=4, capacity=CONTEXT, prefix_cache_mb=0)
        made: dict[object, Request] = {}
        for i in range(4):
            made[i] = Request(random_prompt(i, 6), Sampling(max_tokens=4 + 3 * i, ignore_eos=True), key=i)
            made[i].submit(engine, i)
        step(engine, made)
        made["long"] = Request(random_prompt(9, CONTEXT - 8), Sampling(max_tokens=3, ignore_eos=True), key=9)
        made["long"].submit(engine, "long")
        for i in range(100, 160):
            made[i] = Request(random_prompt(i, 6), Sampling(max_tokens=8, ignore_eos=True), key=i)
            made[i].submit(engine, i)
            step(engine, made)
            if made["long"].token_ids:
                break
            assert not any(made[j].token_ids for j in range(100, i + 1))
        assert made["long"].token_ids
        run(engine, made)
        check_request(made["long"])

    def test_decoding_goes_on_while_a_long_prompt_is_prefilled(self) -> None:
        engine = tiny_engine(max_sequences=3, max_batch_tokens=6, prefix_cache_mb=0)
        made = {0: Request([1, 2], LONG, key=0), 1: Request(random_prompt(1, 40), LONG, key=1)}
        made[0].submit(engine, 0)
        step(engine, made)
        made[1].submit(engine, 1)
        for _ in range(8):
            before = len(made[0].token_ids)
            step(engine, made)
            assert len(made[0].token_ids) == before + 1
        assert made[1].token_ids
        run(engine, made)


class TestPrefixSharing:
    @pytest.mark.parametrize("length", [17, 18, 24, 32, 33, 40])
    @pytest.mark.parametrize("max_batch_tokens", [8, 512])
    def test_a_group_prefills_its_prompt_once(self, length: int, max_batch_tokens: int) -> None:
        """However the chunks fall: every prompt token but the last of each sample is computed once."""
        engine = tiny_engine(max_sequences=8, max_batch_tokens=max_batch_tokens)
        plans = record_plans(engine)
        prompt = random_prompt(50, length)
        made = {i: Request(prompt, Sampling(max_tokens=4, ignore_eos=True), key=i) for i in range(8)}
        for i, request in made.items():
            request.submit(engine, i)
        run(engine, made)
        assert engine.cache.hit_tokens == 7 * (length - 1)
        prefilled = sum(count for plan in plans for _, count in plan.chunks)
        assert length - 1 <= prefilled <= length
        for request in made.values():
            check_request(request)

    def test_without_a_cache_everybody_prefills(self) -> None:
        engine = tiny_engine(max_sequences=8, prefix_cache_mb=0)
        made = {i: Request(random_prompt(50, 20), Sampling(max_tokens=4), key=i) for i in range(8)}
        for i, request in made.items():
            request.submit(engine, i)
        assert len(step(engine, made)) == 8
        run(engine, made)

    def test_a_prefix_of_another_prompt_is_shared_too(self) -> None:
        engine = tiny_engine(max_sequences=4)
        shared = random_prompt(51, 35)
        made = {
            0: Request([*shared, 1, 2], Sampling(max_tokens=3), key=0),
            1: Request([*shared, 3, 4, 5], Sampling(max_tokens=3), key=1),
            2: Request(shared[:34], Sampling(max_tokens=3), key=2),
        }
        for i, request in made.items():
            request.submit(engine, i)
        run(engine, made)
        assert engine.cache.hit_tokens == 35 + 33
        for request in made.values():
            check_request(request)

    def test_who_waited_for_a_prefill_that_is_aborted_goes_on(self) -> None:
        engine = tiny_engine(max_sequences=4, max_batch_tokens=4)
        made = {i: Request(random_prompt(52, 30), Sampling(max_tokens=3), key=i) for i in range(3)}
        for i, request in made.items():
            request.submit(engine, i)
        step(engine, made)
        assert len(engine.scheduler.running) == 1
        engine.abort(0)
        run(engine, {1: made[1], 2: made[2]})
        assert engine.cache.hit_tokens == 29


def _order_of_ending(engine: Engine, made: dict[int, Request]) -> list[int]:
    ended: list[int] = []
    for _ in range(1000):
        if not engine.num_unfinished:
            assert_clean(engine)
            return ended
        ended += [event.request_id for event in step(engine, made) if event.finish_reason]  # type: ignore[misc]
    raise AssertionError("not everything ended")
