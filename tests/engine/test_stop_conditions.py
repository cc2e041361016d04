"""Where a completion ends, why, what its text is, and that streaming gives the same text."""

import dataclasses
from typing import Any

import pytest
from engine_cases import CONTEXT, assert_clean, loaded, random_prompt, tiny_engine, tiny_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import EngineConfig
from headrace.engine import Engine, random_key
from headrace.engine.batch import Batch
from headrace.engine.slots import KVSlots
from headrace.models import decode_completion
from headrace.types import Sampling

END = 258
SAMPLES = 12
"""So many of 50 tokens that some of them draw the end token (checked)."""
PROMPT = random_prompt(40, 8)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def complete(engine: Engine, **settings: object):  # type: ignore[no-untyped-def]
    sampling = Sampling(**({"max_tokens": 40, "seed": 3, "ignore_eos": True} | settings))
    output = engine.generate([PROMPT], sampling)[0]
    assert_clean(engine)
    assert output.prompt_ids == PROMPT
    return output.samples[0]


class TestLimits:
    @pytest.mark.parametrize("max_tokens", [1, 2, 17])
    def test_max_tokens(self, engine: Engine, max_tokens: int) -> None:
        sample = complete(engine, max_tokens=max_tokens)
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) == max_tokens
        assert sample.finish_reason == "length"

    def test_the_context_ends_a_sample(self, engine: Engine) -> None:
        sample = complete(engine, max_tokens=10_000)
        assert len(PROMPT) + len(sample.token_ids) == CONTEXT
        assert sample.finish_reason == "length"

    def test_a_prompt_one_short_of_the_context_gets_one_token(self, engine: Engine) -> None:
        prompt = random_prompt(1, CONTEXT - 1)
        sample = engine.generate([prompt], Sampling(max_tokens=5, ignore_eos=True))[0].samples[0]
        assert len(sample.token_ids) == 1
        assert sample.finish_reason == "length"

    def test_the_last_context_position_matches_a_longer_context(self) -> None:
        """Nothing is wrong at a slot's last rows."""
        prompt, sampling = random_prompt(1, 20), Sampling(max_tokens=200, ignore_eos=True, seed=4)
        short = tiny_engine(context_length=48).generate([prompt], sampling)[0].samples[0]
        long = tiny_engine(context_length=64).generate([prompt], sampling)[0].samples[0]
        assert len(short.token_ids) == 28
        assert long.token_ids[:28] == short.token_ids


class TestStopTokens:
    def test_a_stop_id_is_sampled_and_ends_the_sample_and_is_not_in_the_text(self, engine: Engine) -> None:
        whole = complete(engine)
        stop = whole.token_ids[6]
        first = whole.token_ids.index(stop)
        sample = complete(engine, stop_token_ids=(stop,))
        assert sample.token_ids == whole.token_ids[: first + 1]
        assert sample.logprobs == pytest.approx(whole.logprobs[: first + 1], abs=1e-9)
        assert sample.finish_reason == "stop"
        assert sample.text == decode_completion(engine.tokenizer, whole.token_ids[:first])

    def test_the_models_end_token_ends_a_sample_unless_ignored(self, engine: Engine) -> None:
        sampling = Sampling(n=SAMPLES, max_tokens=50, seed=1)
        ended = [s for s in engine.generate([PROMPT], sampling)[0].samples if s.finish_reason == "stop"]
        assert ended, "no sample drew the end token: choose another seed"
        for sample in ended:
            assert sample.token_ids[-1] == END
            assert END not in sample.token_ids[:-1]
            assert sample.text == decode_completion(engine.tokenizer, sample.token_ids[:-1])
        ignoring = dataclasses.replace(sampling, ignore_eos=True)
        through = engine.generate([PROMPT], ignoring)[0].samples
        assert all(s.finish_reason == "length" and len(s.token_ids) == 50 for s in through)
        assert any(END in s.token_ids[:-1] for s in through)
        assert not any("im_end" in s.text for s in through)

    def test_ignore_eos_leaves_stop_ids_alone(self, engine: Engine) -> None:
        sampling = Sampling(n=SAMPLES, max_tokens=50, seed=1, stop_token_ids=(END,), ignore_eos=True)
        assert any(s.finish_reason == "stop" for s in engine.generate([PROMPT], sampling)[0].samples)

    def test_an_end_token_that_is_no_special_token_is_not_in_the_text(self) -> None:
        """Some checkpoints name an ordinary token as their end of sequence."""
        whole = complete(tiny_engine())
        end = whole.token_ids[9]
        model = dataclasses.replace(tiny_model(), eos_token_ids=(end,))
        engine = Engine(model, EngineConfig(context_length=CONTEXT, max_sequences=2))
        sampling = Sampling(max_tokens=40, seed=3)
        sample = engine.generate([PROMPT], sampling)[0].samples[0]
        first = whole.token_ids.index(end)
        assert sample.finish_reason == "stop"
        assert sample.token_ids == whole.token_ids[: first + 1]
        assert sample.text == decode_completion(engine.tokenizer, whole.token_ids[:first])
        assert "".join(engine.stream(PROMPT, sampling)) == sample.text


def ascii_engine() -> Engine:
    """An engine whose completions are printable ASCII: every other logit is far away."""
    model = tiny_model()
    engine = Engine(model, EngineConfig(context_length=CONTEXT, max_sequences=4, prefix_cache_mb=1))
    forward = engine.runner.forward

    def printable(*arguments: Any) -> Tensor:
        logits = forward(*arguments).clone()
        logits[:, :32] = logits[:, 127:] = -1000.0
        return logits

    engine.runner.forward = printable  # type: ignore[assignment]
    return engine


@pytest.fixture(scope="module")
def printable() -> Engine:
    return ascii_engine()


class TestStopStrings:
    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_a_stop_string_that_spans_tokens(self, printable: Engine, length: int) -> None:
        whole = complete(printable)
        assert len(whole.text) == 40, "one character a token"
        stop = whole.text[10 : 10 + length]
        at = whole.text.index(stop)
        sample = complete(printable, stop=(stop,))
        assert sample.finish_reason == "stop"
        assert sample.token_ids == whole.token_ids[: at + length]
        assert sample.text == whole.text[:at]

    def test_the_first_of_several_ends_it(self, printable: Engine) -> None:
        whole = complete(printable)
        late, early = whole.text[20:23], whole.text[9:12]
        sample = complete(printable, stop=(late, early, "\x00never"))
        assert sample.text == whole.text[: min(whole.text.index(late), whole.text.index(early))]

    def test_the_prompt_does_not_count(self, printable: Engine) -> None:
        """A stop string that ends within the prompt, or spans its end, was not sampled."""
        prompt = [ord(c) for c in "abc"]
        whole = printable.generate([prompt], Sampling(max_tokens=20, seed=3, ignore_eos=True))[0].samples[0]
        for stop in ("abc", "c" + whole.text[0]):
            assume_absent = stop not in whole.text
            sampling = Sampling(max_tokens=20, seed=3, stop=(stop,), ignore_eos=True)
            sample = printable.generate([prompt], sampling)[0].samples[0]
            assert (sample.finish_reason == "length") == assume_absent
            assert sample.text == (whole.text if assume_absent else whole.text.split(stop)[0])

    def test_a_continued_sample_remembers_its_text(self, printable: Engine) -> None:
        """The stop string began before the interruption and ends after it."""
        whole = complete(printable)
        stop = whole.text[8:12]
        sampling = Sampling(max_tokens=40, seed=3, stop=(stop,), ignore_eos=True)
        expected = complete(printable, stop=(stop,))
        kept = len(expected.token_ids) - 2
        key = random_key(3, repr(tuple(PROMPT)), 0, 0)
        printable.submit(
            "rest", PROMPT + expected.token_ids[:kept], sampling, random_key=key, prompt_length=len(PROMPT)
        )
        events = []
        while printable.num_unfinished:
            events += printable.step()
        assert [event.token_id for event in events] == expected.token_ids[kept:]
        assert events[-1].finish_reason == "stop"
        assert_clean(printable)

    def test_within_a_character_of_several_bytes(self, engine: Engine) -> None:
        """No half character is compared or shown, and a stop string may be such a character."""
        logits = engine.runner.forward
        wanted = list("né✓ü.".encode())

        def forced(batch: Batch, slots: KVSlots) -> Tensor:
            out = logits(batch, slots).clone()
            for row, at in enumerate(batch.outputs):
                out[row, wanted[(batch.positions[at] + 1 - len(PROMPT)) % len(wanted)]] = 1000.0
            return out

        engine.runner.forward = forced  # type: ignore[assignment]
        try:
            sample = complete(engine, stop=("✓",))
            assert sample.text == "né"
            assert bytes(sample.token_ids).decode() == "né✓"
            sampling = Sampling(max_tokens=6, stop=("zz",), ignore_eos=True)
            assert list(engine.stream(PROMPT, sampling))
            # Six bytes are "né✓", seven begin the "ü".
            assert complete(engine, max_tokens=6).text == "né✓"
            assert complete(engine, max_tokens=7).text == "né✓\ufffd"
        finally:
            engine.runner.forward = logits  # type: ignore[method-assign]


class TestStream:
    @given(
        seed=st.integers(0, 1000),
        cut=st.integers(0, 20),
        length=st.integers(1, 4),
        kind=st.sampled_from(["none", "string", "id", "both"]),
        plain=st.booleans(),
    )
    @settings(max_examples=40, deadline=None)
    def test_equals_generate(
        self, engine: Engine, printable: Engine, seed: int, cut: int, length: int, kind: str, plain: bool
    ) -> None:
        chosen = printable if plain else engine
        whole = chosen.generate([PROMPT], Sampling(max_tokens=24, seed=seed))[0].samples[0]
        stop = whole.text[cut : cut + length]
        assume(stop and cut < len(whole.token_ids))
        sampling = Sampling(
            max_tokens=24,
            seed=seed,
            stop=(stop,) if kind in {"string", "both"} else (),
            stop_token_ids=(whole.token_ids[cut],) if kind in {"id", "both"} else (),
        )
        expected = chosen.generate([PROMPT], sampling)[0].samples[0]
        pieces = list(chosen.stream(PROMPT, sampling))
        assert "".join(pieces) == expected.text
        assert all(pieces)
        assert_clean(chosen)

    def test_comes_in_pieces(self, printable: Engine) -> None:
        pieces = list(printable.stream(PROMPT, Sampling(max_tokens=20, seed=3, ignore_eos=True)))
        assert len(pieces) == 20
        held = list(
            printable.stream(PROMPT, Sampling(max_tokens=20, seed=3, ignore_eos=True, stop=("\x00\x01",)))
        )
        assert "".join(held) == "".join(pieces)
        assert len(held) >= 19

    def test_an_abandoned_stream_leaves_nothing(self, printable: Engine) -> None:
        stream = printable.stream(PROMPT, Sampling(max_tokens=20))
        next(stream)
        stream.close()
        assert_clean(printable)

    def test_needs_an_idle_engine(self, printable: Engine) -> None:
        """Another request's tokens must not be swallowed by the stream."""
        printable.submit("other", PROMPT, Sampling(max_tokens=3))
        with pytest.raises(RuntimeError, match="idle"):
            next(printable.stream(PROMPT))
        with pytest.raises(RuntimeError, match="idle"):
            printable.generate([PROMPT])
        events = []
        while printable.num_unfinished:
            events += printable.step()
        assert len(events) == 3
        assert_clean(printable)

    @pytest.mark.real
    def test_smollm2_chat(self) -> None:
        model = loaded("smollm2-135m", "float32", "headrace")
        engine = Engine(model, EngineConfig(context_length=64, max_sequences=2))
        messages = [{"role": "user", "content": "Say hello."}]
        sampling = Sampling(temperature=0, max_tokens=10, stop=("!",))
        sample = engine.generate([messages], sampling)[0].samples[0]
        assert sample.text.startswith("Hello")
        assert "!" not in sample.text
        assert sample.finish_reason == "stop"
        assert "".join(engine.stream(messages, sampling)) == sample.text
