"""headrace's side of the KV rows: prefills, moves and restores prefixes, and plays conversations.

Settings: `model`, `engine` (fields of `[engine]`), `shared_name` of its host tier. Requests, by `do`:

    prefill   ids: computes them, with nothing cached; keeps them in the device tier. -> seconds to the first token
    move      ids, source, target: -> seconds, bytes, tokens held by the target
    restore   ids, times: copies them from wherever they lie into a slot. -> seconds of each time, tokens restored
    forget    ids, tiers: drops the tier's copies ("cold": the disk's pages leave the system's cache)
    copy      bytes, times: a plain copy between two shared mappings. -> seconds of each time
    converse  sessions, turns, first, answer, sampled: conversations that take turns. -> seconds to each turn's first
              token, tokens asked for and found
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.line.setup import default_threads
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.machine import tune_allocator
from headrace.state.weights import content_digest
from headrace.types import Sampling


def first_token(
    engine: Engine, ids: list[int], sampled: int = 1, keep: bool = False
) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens that were drawn."""
    started = time.perf_counter()
    engine.submit(0, ids, Sampling(temperature=0.0, max_tokens=sampled, ignore_eos=True), keep_kv=keep)
    drawn: list[int] = []
    seconds = 0.0
    while engine.num_unfinished:
        for event in engine.step():
            if not drawn:
                seconds = time.perf_counter() - started
            drawn.append(event.token_id)
    return seconds, drawn


class Side:
    """The engine, and what can be asked of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        model = load_model(resolve(settings["model"]), attn_implementation=ATTENTION)
        self.engine = Engine(
            model,
            EngineConfig(**settings["engine"]),
            content_digest(model.module),
            kv_shared_name=settings["shared_name"],
        )
        self.directory = self.engine.directory

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handler = getattr(self, request.pop("do"))
        result: dict[str, Any] = handler(**request)
        return result

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        return {"seconds": first_token(self.engine, ids)[0]}

    def move(self, ids: list[int], source: str, target: str) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = self.directory.migrate(ids, source, target)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": tokens, "bytes": tokens * self.engine.kv_bytes_per_token}

    def restore(self, ids: list[int], times: int) -> dict[str, Any]:
        slots = self.engine.slots
        slot = slots.take()
        slots.grow(slot, len(ids))
        seconds, tokens = [], []
        for _ in range(times):
            started = time.perf_counter()
            restored = self.directory.restore(ids, slots.rows(slot), len(ids))
            seconds.append(time.perf_counter() - started)
            tokens.append(restored.length)
        slots.free(slot)
        return {"seconds": seconds, "tokens": tokens, "bytes": tokens[0] * self.engine.kv_bytes_per_token}

    def forget(self, tiers: list[str], cold: bool = False) -> dict[str, Any]:
        for name in tiers:
            self.directory.evict(name, 1 << 40)
        if cold and self.directory.disk is not None:
            for path in Path(self.engine.config.kv_disk_folder or "").rglob("*"):
                if path.is_file():
                    file = os.open(path, os.O_RDONLY)
                    os.fsync(file)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)
        return {}

    def copy(self, bytes: int, times: int) -> dict[str, Any]:
        source, target = (np.frombuffer(mmap.mmap(-1, bytes), dtype=np.uint8) for _ in range(2))
        source[:], target[:] = 1, 2
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            target[:] = source
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds}

    def converse(self, sessions: int, turns: int, first: int, answer: int, sampled: int) -> dict[str, Any]:
        rng = random.Random(0)

        def words(count: int) -> list[int]:
            return [rng.randrange(1000, 20000) for _ in range(count)]

        histories = [words(first) for _ in range(sessions)]
        waits: list[list[float]] = []
        asked = found = 0
        for turn in range(turns):
            waits.append([])
            for session in rng.sample(range(sessions), sessions):
                history = histories[session]
                before = self.engine.cache.queried_tokens, self.engine.cache.hit_tokens
                seconds, drawn = first_token(self.engine, history, sampled, keep=True)
                waits[-1].append(seconds)
                if turn:
                    asked += self.engine.cache.queried_tokens - before[0] - answer
                    found += self.engine.cache.hit_tokens - before[1]
                history.extend(drawn)
                self.engine.expect(history, 1.0)
                history.extend(words(answer))
        return {"first_token_s": waits, "asked": asked, "found": found}


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(default_threads())
    tune_allocator()
    side = Side(settings)
    with torch.inference_mode():
        serving.serve({"threads": torch.get_num_threads()}, side.answer)


if __name__ == "__main__":
    main()
