"""The prefilling half of an engine: prompts in, KV in shared memory out.

Invariants
* One prompt is computed at a time, in the order of arrival, a chunk per `step`.
* A finished prompt stands in its slot, unmoved and unwritten, until `drop`.
* All KV of a finished prompt was computed under the weights that its `Ready` names; a prompt that was asked for under
  other weights is refused.
* A slot that was given up keeps its KV until it is needed: the next prompt that begins alike goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.engine.batch import Batch, Chunk
from headrace.engine.engine import context_limit
from headrace.engine.forward import Prepared, make_forward
from headrace.engine.sequence import shared_prefix
from headrace.engine.slots import BufferPlace, KVSlots, bytes_per_token
from headrace.errors import UserError
from headrace.models import LoadedModel
from headrace.state.machine import available_mb


class Geometry(NamedTuple):
    """What two engines must agree in so that one's KV is the other's, in every bit."""

    forward: str
    weight_format: str
    kv_dtype: torch.dtype
    planes: tuple[tuple[int, int], ...]
    """Per buffer its planes and the width of a row."""

    @classmethod
    def of(cls, forward: object, weight_format: str, slots: KVSlots) -> Geometry:
        rows = slots.read(0, 0, 0)
        planes = tuple((tensor.shape[0], tensor.shape[2]) for tensor in rows)
        return cls(type(forward).__name__, weight_format, rows[0].dtype, planes)


class Prompt(NamedTuple):
    """Compute the KV of these tokens (int32) under these weights."""

    number: int
    tokens: bytes
    weights_id: str


class Drop(NamedTuple):
    """A prompt is no longer wanted: its slot is free, or its computation void."""

    number: int


class Hello(NamedTuple):
    """The prefilling side is ready. The descriptor of its memory follows."""

    geometry: Geometry
    places: tuple[BufferPlace, ...]
    slots: int
    context_length: int


class Failed(NamedTuple):
    """The prefilling side could not start."""

    reason: str


class Progress(NamedTuple):
    """So many tokens of a prompt are computed: a sign of life."""

    number: int
    computed: int


class Ready(NamedTuple):
    """The KV of a prompt's `count` tokens stands in a slot."""

    number: int
    slot: int
    count: int
    weights_id: str


class Refused(NamedTuple):
    """A prompt will not be computed here; nothing is held for it."""

    number: int
    reason: str


Answer = Progress | Ready | Refused


@dataclass(slots=True)
class _Job:
    number: int
    tokens: list[int]
    weights_id: str
    slot: int = -1
    computed: int = 0


@dataclass(slots=True)
class _Slot:
    """`tokens` are those whose KV it holds; `owner` is the prompt that has it, None where it is free."""

    tokens: list[int] = field(default_factory=list)
    owner: int | None = None
    last_used: int = 0


class Prefiller:
    """Computes prompts into KV slots of its own.

    Args:
        model: loaded with `attn_implementation="headrace"`.
        config: its `context_length`, `weight_format`, `prepack` and `max_batch_tokens` (the size of a chunk) count.
        shared: descriptor of an empty file in memory, in which the slots will lie.
        slots: prompts that can stand finished and unclaimed, or in work, at once.

    Raises:
        UserError: the settings are impossible, or there is too little memory.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, weights_id: str, shared: int, slots: int
    ) -> None:
        if model.device.type != "cpu":
            raise UserError('prefilling in another process needs model.device = "cpu"')
        self.config = config
        self.version = 0
        self.weights_id = weights_id
        self.context_length = context_limit(model.context_length, config)
        int8 = config.weight_format == "int8"
        self.forward = make_forward(
            model.module, prepack=config.prepack, int8=int8, context_length=self.context_length
        )
        needed = slots * self.context_length * bytes_per_token(self.forward.shapes, self.forward.kv_dtype)
        if needed / 2**20 > available_mb():
            raise UserError(
                f"too little memory for prefilling: {slots} prompts of up to {self.context_length} tokens take "
                f"{needed / 2**20:,.0f} MB, {available_mb():,.0f} MB are free; lower engine.context_length"
            )
        self.slots = KVSlots(
            self.forward.shapes,
            slots,
            self.context_length,
            slots * self.context_length,
            self.forward.kv_dtype,
            model.device,
            shared,
        )
        self._slots = [_Slot() for _ in range(slots)]
        self._jobs: deque[_Job] = deque()
        self._clock = 0

    @property
    def hello(self) -> Hello:
        geometry = Geometry.of(self.forward, self.config.weight_format, self.slots)
        return Hello(geometry, tuple(self.slots.places), len(self._slots), self.context_length)

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self._jobs)

    def add(self, prompt: Prompt) -> None:
        tokens = np.frombuffer(prompt.tokens, dtype=np.int32).tolist()
        self._jobs.append(_Job(prompt.number, tokens, prompt.weights_id))

    def drop(self, number: int) -> None:
        """Give up a prompt in whatever state; unknown ones are ignored."""
        for job in list(self._jobs):
            if job.number == number:
                self._jobs.remove(job)
        for slot in self._slots:
            if slot.owner == number:
                slot.owner = None

    def update_weights(self, version: int, weights_id: str, prepared: Prepared | None = None) -> None:
        """As `Engine.update_weights`. KV of the old weights serves nobody but those who were promised it."""
        if prepared is None:
            self.forward.repack()
        else:
            self.forward.switch(prepared)
        self.version = version
        if weights_id != self.weights_id:
            self.weights_id = weights_id
            for slot in self._slots:
                slot.tokens = []

    @torch.inference_mode()
    def step(self) -> Answer | None:
        """Compute the next chunk; None if there is nothing to compute or no slot is free."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        reason = self._objection(job)
        if reason is not None:
            self.drop(job.number)
            return Refused(job.number, reason)
        if job.slot < 0 and not self._begin(job):
            return None
        slot = self._slots[job.slot]
        if job.computed < len(job.tokens):
            stop = min(len(job.tokens), job.computed + self.config.max_batch_tokens)
            positions = list(range(job.computed, stop))
            chunk = Chunk(job.slot, job.computed, stop, 0)
            self.forward(Batch(job.tokens[job.computed : stop], positions, [], [chunk], [], []), self.slots)
            slot.tokens.extend(job.tokens[job.computed : stop])
            job.computed = stop
        if job.computed < len(job.tokens):
            return Progress(job.number, job.computed)
        self._jobs.popleft()
        return Ready(job.number, job.slot, job.computed, self.weights_id)

    def _objection(self, job: _Job) -> str | None:
        if job.weights_id != self.weights_id:
            return "the weights differ"
        if len(job.tokens) >= self.context_length:
            return f"the prompt is longer than its context of {self.context_length}"
        return None

    def _begin(self, job: _Job) -> bool:
        """Take the free slot that holds the most of the prompt already, among equals the one that rested longest."""
        free = [slot for slot in self._slots if slot.owner is None]
        if not free:
            return False
        best = max(free, key=lambda slot: (shared_prefix(slot.tokens, job.tokens), -slot.last_used))
        self._clock += 1
        job.slot = self._slots.index(best)
        job.computed = shared_prefix(best.tokens, job.tokens)
        best.owner, best.last_used = job.number, self._clock
        del best.tokens[job.computed :]
        return True


def packed_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
