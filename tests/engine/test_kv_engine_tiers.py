"""The engine over KV tiers: the same tokens as without a cache, over turns, evictions, restarts, engines and damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import (
    CONTEXT,
    Request,
    random_prompt,
    run,
    step,
    switch,
    tiny_engine,
    tiny_model,
)

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine import kv as engine_kv
from headrace.engine.kv import shared_name_of
from headrace.errors import UserError
from headrace.state.eviction import Kind
from headrace.state.tiers import segment as segment_module
from headrace.state.tiers.base import DEVICE, DISK, HOST
from headrace.types import Sampling


@pytest.fixture(autouse=True)
def _memory_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(segment_module, "memory_folder", lambda: folder)
    monkeypatch.setattr(engine_kv, "BLOCK_TOKENS", 4)


def tiered(folder: Path, device_tokens: int = 16, **settings: object) -> Engine:
    """An engine whose device tier holds few tokens."""
    settings = {"kv_host_mb": 1, "kv_disk_mb": 8, "kv_disk_folder": str(folder / "kv")} | settings
    engine = tiny_engine(**settings)
    engine.cache.capacity_bytes = device_tokens * engine.kv_bytes_per_token
    return engine


def answer(engine: Engine, prompt: list[int], key: int, keep_kv: bool = True, tokens: int = 6) -> Request:
    request = Request(prompt, Sampling(temperature=1.0, max_tokens=tokens, ignore_eos=True), key)
    engine.submit(key, prompt, request.sampling, random_key=key, keep_kv=keep_kv)
    run(engine, {key: request})
    return request


def same(a: Request, b: Request) -> bool:
    return a.token_ids == b.token_ids and np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-9)


def where(engine: Engine, tokens: list[int]) -> dict[str, int]:
    return {place.tier: place.matched_length for place in engine.directory.locate(tokens)}


def test_the_next_turn_finds_prompt_and_answer(tmp_path: Path) -> None:
    engine, plain = tiered(tmp_path, 64), tiny_engine(prefix_cache_mb=0)
    prompt = random_prompt(0, 10)
    for turn in range(3):
        hits = engine.cache.hit_tokens
        request = answer(engine, prompt, turn)
        assert same(request, answer(plain, prompt, turn))
        assert engine.cache.hit_tokens - hits == (len(prompt) - 6 if turn else 0)
        prompt = [*prompt, *request.token_ids, *random_prompt(turn + 1, 5)]
    kinds = {block.kind for _, block in engine.cache.blocks()}
    assert Kind.WAITING in kinds
    engine.release(prompt)
    assert Kind.WAITING not in {block.kind for _, block in engine.cache.blocks()}
    assert plain.cache.hit_tokens == 0
    engine.close()


def test_kv_that_is_not_kept_holds_the_prompt_alone(tmp_path: Path) -> None:
    engine = tiered(tmp_path, 64)
    request = answer(engine, random_prompt(0, 8), 0, keep_kv=False)
    assert where(engine, [*request.prompt, *request.token_ids]) == {DEVICE: 8}
    engine.close()


def conversations(engine: Engine, plain: Engine, count: int = 6, turns: int = 3, first: int = 0) -> None:
    prompts = [random_prompt(first + i, 8 + i) for i in range(count)]
    for turn in range(turns):
        for i in range(count):
            key = (first + i) * 100 + turn
            request = answer(engine, prompts[i], key)
            assert same(request, answer(plain, prompts[i], key))
            engine.expect([*prompts[i], *request.token_ids], 0.0)
            prompts[i] = [*prompts[i], *request.token_ids, *random_prompt(turn + 1, 3)]
            engine.directory.cache.check_integrity()


@pytest.mark.parametrize("evict", ["cost", "lru"])
def test_sessions_that_do_not_fit_the_device_live_in_lower_tiers(tmp_path: Path, evict: str) -> None:
    engine, plain = tiered(tmp_path, kv_evict=evict), tiny_engine(prefix_cache_mb=0)
    conversations(engine, plain)
    stats = {stats.name: stats.counters for stats in engine.directory.stats()}
    assert stats[HOST].hits > 20
    assert stats[HOST].corrupt == stats[DISK].corrupt == 0
    assert engine.cache.hit_tokens > 0.6 * engine.cache.queried_tokens
    engine.close()
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_restart_goes_on_from_disk_and_other_weights_do_not(tmp_path: Path) -> None:
    first, plain = tiered(tmp_path), tiny_engine(prefix_cache_mb=0)
    request = answer(first, random_prompt(1, 20), 1)
    first.close()
    again = [*request.prompt, *request.token_ids, 5, 6]
    second = tiered(tmp_path)
    assert where(second, again) == {DISK: 24}
    assert same(answer(second, again, 2), answer(plain, again, 2))
    assert second.cache.hit_tokens == 24
    second.close()
    third = tiered(tmp_path)
    switch(third, 1)
    switch(plain, 1)
    assert where(third, again) == {}
    assert same(answer(third, again, 2), answer(plain, again, 2))
    assert third.cache.hit_tokens == 0
    third.close()


def test_weights_without_a_name_go_by_their_content(tmp_path: Path) -> None:
    config = EngineConfig(context_length=CONTEXT, kv_disk_mb=1, kv_disk_folder=str(tmp_path / "kv"))
    engines = [Engine(tiny_model(), config) for _ in range(2)]
    names = {engine.weights_id for engine in engines}
    model = tiny_model()
    with torch.no_grad():
        next(model.module.parameters())[0, 0] += 1
    other = Engine(model, config)
    assert len(names) == 1
    assert other.weights_id not in names
    for engine in (*engines, other):
        assert engine.weights_id.startswith("content-")
        engine.close()
    assert Engine(tiny_model(), EngineConfig(context_length=CONTEXT)).weights_id == "loaded"


def test_the_identity_names_how_numbers_are_computed(tmp_path: Path) -> None:
    float64, float32 = tiered(tmp_path), tiered(tmp_path, dtype="float32")
    assert float64.directory.identity != float32.directory.identity
    request = answer(float32, random_prompt(1, 20), 1)
    float32.close()
    assert where(float64, request.prompt) == {}
    float64.close()


def test_two_engines_share_host_memory(tmp_path: Path) -> None:
    config = EngineConfig(context_length=CONTEXT, max_sequences=4, prefix_cache_mb=1, kv_host_mb=1)
    name = shared_name_of(tmp_path)
    one, two = (Engine(tiny_model(), config, "w0", kv_shared_name=name) for _ in range(2))
    plain = tiny_engine(prefix_cache_mb=0)
    request = answer(one, random_prompt(3, 24), 1)
    assert one.directory.migrate(request.prompt, DEVICE, HOST) == 24
    assert same(answer(two, request.prompt, 2), answer(plain, request.prompt, 2))
    assert two.cache.hit_tokens == 23
    switch(one, 1)
    assert where(one, request.prompt) == {}
    assert where(two, request.prompt) == {HOST: 24}
    one.close()
    two.close()


def test_damage_in_every_tier_costs_time_only(tmp_path: Path) -> None:
    plain = tiny_engine(prefix_cache_mb=0)
    rng = np.random.default_rng(0)
    prompts = [random_prompt(i, 30) for i in range(4)]
    expected = [answer(plain, prompt, i) for i, prompt in enumerate(prompts)]
    for round_ in range(12):
        engine = tiered(tmp_path / f"{round_}")
        for i, prompt in enumerate(prompts):
            assert same(answer(engine, prompt, i), expected[i])
        memory = np.frombuffer(engine.directory.host.segment.map, dtype=np.uint8)
        used = len(memory) if round_ % 2 else engine.directory.host.segment.shape.data_at
        at = rng.integers(used, size=200)
        memory[at] ^= (1 << rng.integers(8, size=200)).astype(np.uint8)
        del memory
        if round_ % 3 == 0:
            engine.directory.evict(HOST, 1 << 30)
        for path in (tmp_path / f"{round_}" / "kv").glob("*/*.kv"):
            data = bytearray(path.read_bytes())
            data[int(rng.integers(len(data)))] ^= 1
            path.write_bytes(data)
        for i, prompt in enumerate(prompts):
            assert same(answer(engine, prompt, i), expected[i])
        engine.close()


def test_settings_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="set prefix_cache_mb above 0"):
        EngineConfig(prefix_cache_mb=0, kv_host_mb=1)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(segment_module, "memory_folder", lambda: tmp_path / "file")
    with pytest.raises(UserError, match=r"engine\.kv_host_mb = 1: .*; lower it, or set it to 0"):
        tiered(tmp_path)


@pytest.mark.parametrize("where", ["a file", "in a file"])
def test_a_disk_folder_that_cannot_be_one_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" if where == "a file" else tmp_path / "file" / "kv"
    with pytest.raises(UserError, match=r"engine\.kv_disk_mb needs a folder to write to: .*file"):
        tiered(tmp_path, kv_disk_folder=str(folder))
    assert list((tmp_path / "memory").iterdir()) == []


def test_kv_that_mixes_weights_is_never_kept(tmp_path: Path) -> None:
    engine = tiered(tmp_path, 64, kv_on_update="keep")
    request = Request(random_prompt(2, 12), Sampling(max_tokens=6, ignore_eos=True), 0)
    engine.submit(0, request.prompt, request.sampling, keep_kv=True)
    for _ in range(3):
        step(engine, {0: request})
    switch(engine, 1)
    run(engine, {0: request})
    assert any(request.mixed)
    assert where(engine, [*request.prompt, *request.token_ids]) == {}
    assert engine.directory.locate(request.prompt, "w0") == []
    engine.close()
