"""headrace's side of the rows about engines in two processes.

Settings: `part`, one of

    stream    decoding sequences while long prompts keep coming: by one engine with chunked prefill (`apart` false), or
              by an engine and a prefilling process on one core each. A request: `sequences`, `tokens`, `prompt`,
              `every_s`. -> the seconds between two tokens of each sequence.
    publisher publishes weights in shared memory; a request changes and publishes them. -> seconds
    follower  decodes and follows `store`. A request: `version` to reach, `steps` to decode after that. -> seconds of
              every step, seconds that decoding stopped per switch, those of the step after it, and memory in MB after
              every step
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import atexit
import os
import random
import time
from typing import Any

import torch

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine.follow import follow
from headrace.engine.handoff import DisaggregatedEngine
from headrace.line.setup import default_threads
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.machine import resident_mb, tune_allocator
from headrace.state.weights import WeightStore, mint
from headrace.types import Sampling

MODEL = "smollm2-135m"


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 20000) for _ in range(count)]


def stream(settings: dict[str, Any]) -> Any:
    """Decoding beside a stream of prompts."""
    engine_settings = settings["engine"]
    if settings["apart"]:
        cores = sorted(os.sched_getaffinity(0))
        engine: Engine = DisaggregatedEngine.load(MODEL, cores=cores[1:2], threads=1, **engine_settings)
        os.sched_setaffinity(0, cores[:1])
        torch.set_num_threads(1)
    else:
        engine = Engine.load(MODEL, **engine_settings)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        rng = random.Random(request["seed"])
        for i in range(request["sequences"]):
            sampling = Sampling(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True)
            engine.submit(("decoding", i), words(rng, 48), sampling)
        last: dict[Any, float] = {}
        gaps: list[float] = []
        prompts = arrived = 0
        started = time.perf_counter()
        while any(key[0] == "decoding" for key in _unfinished(last, request["sequences"])):
            now = time.perf_counter()
            if last and now - started > prompts * request["every_s"]:
                one = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
                # Less urgent than what decodes.
                engine.submit(("prompt", prompts), words(rng, request["prompt"]), one, priority=(1,))
                prompts += 1
            for event in engine.step():
                now = time.perf_counter()
                if event.request_id[0] == "prompt":  # type: ignore[index]
                    arrived += 1
                    continue
                if event.request_id in last:
                    gaps.append(now - last[event.request_id])
                last[event.request_id] = now
                if event.finish_reason:
                    last[event.request_id] = -1.0
        seconds = time.perf_counter() - started
        while engine.num_unfinished:
            arrived += sum(event.request_id[0] == "prompt" for event in engine.step())  # type: ignore[index]
        drained = time.perf_counter() - started
        return {"gaps": gaps, "prompts": arrived, "seconds": seconds, "drained_s": drained}

    return answer


def _unfinished(last: dict[Any, float], sequences: int) -> list[Any]:
    """The decoding sequences that have not ended."""
    keys = [("decoding", i) for i in range(sequences)]
    return [key for key in keys if last.get(key, 0.0) >= 0.0]


def publisher(settings: dict[str, Any]) -> Any:
    """The side that trains."""
    torch.set_num_threads(1)
    model = load_model(resolve(MODEL), attn_implementation=ATTENTION)
    store = WeightStore(settings["store"], model.module)
    atexit.register(store.close)
    store.publish(0, mint())
    version = 0

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal version
        version += 1
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(1.0 + 1e-6)
        started = time.perf_counter()
        store.publish(version, mint())
        return {"seconds": time.perf_counter() - started, "version": version}

    return answer


def follower(settings: dict[str, Any]) -> Any:
    """The side that generates."""
    torch.set_num_threads(1)
    model = load_model(resolve(MODEL), attn_implementation=ATTENTION)
    # No prefix cache, so that memory grows by weights alone.
    config = EngineConfig(max_sequences=8, context_length=512, prefix_cache_mb=0)
    following = follow(model, settings["store"], config)
    engine = following.engine
    rng = random.Random(0)

    def step() -> float:
        while engine.num_unfinished < 8:
            sampling = Sampling(max_tokens=100, ignore_eos=True)
            engine.submit(rng.random(), words(rng, 48), sampling)
        started = time.perf_counter()
        engine.step()
        return time.perf_counter() - started

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        """Decode for a while, or until `version` is there."""
        steps, memory, stopped, after = [], [], [], []
        switched = False
        left = request["steps"]
        while engine.version < request["version"] or left:
            left -= engine.version == request["version"]
            steps.append(step())
            if switched:
                after.append(steps[-1])
            memory.append(resident_mb())
            started = time.perf_counter()
            switched = following.poll()
            if switched:
                stopped.append(time.perf_counter() - started)
        return {
            "steps": steps,
            "stopped": stopped,
            "after": after,
            "pack_s": following.last_pack_s,
            "memory_mb": memory,
        }

    return answer


def main() -> None:
    settings = serving.settings()
    tune_allocator()
    torch.set_num_threads(default_threads())
    parts = {"stream": stream, "publisher": publisher, "follower": follower}
    with torch.inference_mode(settings["part"] != "publisher"):
        serving.serve({}, parts[settings["part"]](settings))


if __name__ == "__main__":
    main()
