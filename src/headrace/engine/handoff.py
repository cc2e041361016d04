"""An engine whose long prompts another process prefills, so that their prefill does not stop its decoding.

Invariants
* The tokens and log-probs are those of an engine that does it all by itself: KV is taken over only if it was computed
  under the same weights (`weights_id`), in the same format and layout. A prompt's last token is always computed here.
* KV is copied once, from the other process's slot into this one's, a piece per step beside what decodes; the other
  slot is given back when nobody here reads it any more.
* A prefilling side that is dead, silent for `deadline_s` or refuses costs time and nothing else: its prompts are
  prefilled here, `handoffs` counts them, and a warning says so once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headrace.config import EngineConfig, describe
from headrace.engine.engine import Engine, TokenEvent
from headrace.engine.forward import Prepared
from headrace.engine.prefill import Drop, Geometry, Prompt, Ready, Refused, packed_tokens
from headrace.engine.process import PrefillLost, PrefillProcess
from headrace.engine.sequence import ArrivingKV, EngineSequence
from headrace.engine.slots import map_buffers
from headrace.errors import UserError
from headrace.models import LoadedModel, load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.weights import content_digest
from headrace.types import Sampling

logger = logging.getLogger("headrace.engine")

MIN_PROMPT = 128
"""Prompt tokens below which prefilling elsewhere is not worth the way there."""

_IDLE_S = 0.05


@dataclass(slots=True)
class HandoffCounts:
    """Prompts by what became of them, and tokens whose KV was taken over."""

    sent: int = 0
    adopted: int = 0
    refused: int = 0
    stale: int = 0
    """Computed under weights that were no longer this engine's."""
    lost: int = 0
    """Under way when the prefilling side was given up."""
    adopted_tokens: int = 0
    reason: str = ""
    """Why the prefilling side was given up, if it was."""


@dataclass(eq=False, slots=True)
class _Handoff:
    """A prompt that is prefilled elsewhere, the requests that wait for it, and those that copy it now."""

    number: int
    tokens: tuple[int, ...]
    waiting: list[EngineSequence] = field(default_factory=list)
    sent: bool = False
    ready: Ready | None = None
    copying: list[EngineSequence] = field(default_factory=list)

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        return min(sequence.order for sequence in self.waiting)


class DisaggregatedEngine(Engine):
    """An `Engine` that decodes, beside a `PrefillProcess`.

    Each computes on cores of its own: call `torch.set_num_threads` with what is left to this process.

    Args:
        model, config, weights_id, options: as for `Engine`. The prefilling process must have the same weights under the
            same id (`state.weights.content_digest` where both load a folder), or everything is prefilled here.
        prefill: works for this engine alone. `close` ends it.
        min_prompt: prompts with fewer tokens that are not in the prefix cache are prefilled here.
        deadline_s: how long the prefilling side may be silent while it has work.

    Raises:
        UserError: the prefilling side cannot start, or its KV would not be this engine's.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        weights_id: str = "loaded",
        *,
        prefill: PrefillProcess,
        min_prompt: int = MIN_PROMPT,
        deadline_s: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(model, config, weights_id, **options)
        self.prefill, self.min_prompt, self.deadline_s = prefill, max(min_prompt, 1), deadline_s
        self.handoffs = HandoffCounts()
        hello = prefill.wait_ready()
        ours = Geometry.of(self.forward, self.config.weight_format, self.slots)
        if hello.geometry != ours:
            raise UserError(
                f"the prefilling process computes other KV than this engine: {tuple(hello.geometry)} there, "
                f"{tuple(ours)} here; give both the same model and settings"
            )
        self._longest_prompt = hello.context_length - 1
        self._free_slots = hello.slots
        self._sources = map_buffers(prefill.memory, hello.places, ours.kv_dtype)
        self._handoffs: dict[int, _Handoff] = {}
        self._numbers = 0
        self._heard = 0.0
        self._refusals: set[str] = set()

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model: str,
        *,
        dtype: str = "float32",
        min_prompt: int = MIN_PROMPT,
        deadline_s: float = 60.0,
        slots: int = 4,
        threads: int = 1,
        cores: Sequence[int] = (),
        **settings: Any,
    ) -> DisaggregatedEngine:
        """Load a model twice: here, and in a prefilling process.

        Args:
            slots, threads, cores: of that process, see `PrefillProcess`.
            settings: fields of the `[engine]` section.

        Raises:
            UserError: the model is missing or refused, or the settings are impossible.
        """
        try:
            config = EngineConfig(**settings)
        except ValidationError as error:
            raise UserError(f"engine settings: {describe(error, EngineConfig)}") from None
        prefill = PrefillProcess(model, config, dtype=dtype, slots=slots, threads=threads, cores=cores)
        try:
            loaded = load_model(resolve(model), dtype=dtype, attn_implementation=ATTENTION)
            weights_id = content_digest(loaded.module)
            return cls(
                loaded, config, weights_id, prefill=prefill, min_prompt=min_prompt, deadline_s=deadline_s
            )
        except BaseException:
            prefill.close()
            raise

    @property
    def num_unfinished(self) -> int:
        return super().num_unfinished + sum(len(h.waiting) for h in self._handoffs.values())

    def submit(
        self,
        request_id: Hashable,
        token_ids: Sequence[int],
        sampling: Sampling,
        **options: Any,
    ) -> None:
        if self._waiting(request_id) is not None:
            raise UserError(f"request {request_id!r} is already running")
        super().submit(request_id, token_ids, sampling, **options)
        sequence = self.scheduler.find(request_id)
        if sequence is not None and self._worth_sending(sequence):
            self.scheduler.waiting.remove(sequence)
            self._hand_off(sequence)

    def abort(self, request_id: Hashable) -> bool:
        found = self._waiting(request_id)
        if found is None:
            return super().abort(request_id)
        handoff, sequence = found
        handoff.waiting.remove(sequence)
        self._detokenizers.pop(request_id, None)
        self._close_unwanted(handoff)
        return True

    def set_priority(self, request_id: Hashable, priority: tuple[int, ...]) -> None:
        found = self._waiting(request_id)
        if found is None:
            super().set_priority(request_id, priority)
        else:
            found[1].priority = priority

    def step(self) -> list[TokenEvent]:
        self._exchange(0.0)
        if not super().num_unfinished and self._handoffs:
            # Nothing to decode: wait for a prompt, under the deadline that `_exchange` keeps.
            self._exchange(_IDLE_S)
        if not super().num_unfinished:
            self.last_decoded = self.last_prefilled = 0
            return []
        events = super().step()
        self._close_copied()
        return events

    def update_weights(self, version: int, weights_id: str, prepared: Prepared | None = None) -> None:
        super().update_weights(version, weights_id, prepared)
        for handoff in list(self._handoffs.values()):
            if handoff.ready is not None:
                self._judge(handoff, handoff.ready)

    def close(self) -> None:
        """End the prefilling process, and what `Engine.close` ends."""
        self._give_up("was closed", quiet=True)
        super().close()

    def _worth_sending(self, sequence: EngineSequence) -> bool:
        count = len(sequence.token_ids) - 1
        if self.handoffs.reason or not self.min_prompt <= count <= self._longest_prompt:
            return False
        return count - self.directory.matched_length(sequence.token_ids, count) >= self.min_prompt

    def _hand_off(self, sequence: EngineSequence) -> None:
        """Let a request wait for its prompt; equal prompts are prefilled once."""
        tokens = tuple(sequence.token_ids[:-1])
        handoff = next((h for h in self._handoffs.values() if h.tokens == tokens), None)
        if handoff is None:
            self._numbers += 1
            handoff = self._handoffs[self._numbers] = _Handoff(self._numbers, tokens)
        handoff.waiting.append(sequence)

    def _waiting(self, request_id: Hashable) -> tuple[_Handoff, EngineSequence] | None:
        for handoff in self._handoffs.values():
            for sequence in handoff.waiting:
                if sequence.request_id == request_id:
                    return handoff, sequence
        return None

    def _exchange(self, wait_s: float) -> None:
        """Hear the prefilling side, give it work, and take over what it has finished."""
        self._close_copied()
        if not self._handoffs or self.handoffs.reason:
            return
        try:
            self._send_prompts()
            for message in self.prefill.receive(wait_s):
                self._heard = time.monotonic()
                handoff = self._handoffs.get(message.number)
                if handoff is None:
                    continue  # dropped meanwhile
                if isinstance(message, Ready):
                    self._judge(handoff, message)
                elif isinstance(message, Refused):
                    self._refused(handoff, message.reason)
            under_way = any(h.sent and h.ready is None for h in self._handoffs.values())
            if under_way and time.monotonic() - self._heard > self.deadline_s:
                raise PrefillLost(f"has been silent for {self.deadline_s:g} s")
            self._adopt_ready()
            self._send_prompts()
        except PrefillLost as lost:
            self._give_up(str(lost))

    def _send_prompts(self) -> None:
        """Send the most urgent prompts, as many as it has slots for: then each one that was sent can be computed."""
        unsent = sorted((h for h in self._handoffs.values() if not h.sent), key=lambda h: h.order)
        for handoff in unsent[: self._free_slots]:
            if not any(h.sent and h.ready is None for h in self._handoffs.values()):
                self._heard = time.monotonic()
            self.prefill.send(Prompt(handoff.number, packed_tokens(handoff.tokens), self.weights_id))
            handoff.sent = True
            self._free_slots -= 1
            self.handoffs.sent += 1

    def _judge(self, handoff: _Handoff, ready: Ready) -> None:
        if ready.weights_id == self.weights_id and ready.count == len(handoff.tokens):
            handoff.ready = ready
        else:
            self.handoffs.stale += 1
            # Whoever was copying it has been sent back to the queue, and nobody may join.
            handoff.copying = []
            self._prefill_here(handoff)

    def _refused(self, handoff: _Handoff, reason: str) -> None:
        self.handoffs.refused += 1
        if reason not in self._refusals:
            self._refusals.add(reason)
            logger.warning("the prefilling process refused a prompt, which is prefilled here: %s", reason)
        self._prefill_here(handoff)

    def _adopt_ready(self) -> None:
        ready = [h for h in self._handoffs.values() if h.ready is not None and h.waiting]
        for handoff in sorted(ready, key=lambda h: h.order):
            assert handoff.ready is not None
            slot, count = handoff.ready.slot, handoff.ready.count
            arriving = ArrivingKV([source[slot, :, :count] for source in self._sources], count)
            before = len(handoff.copying)
            for sequence in sorted(handoff.waiting, key=lambda s: s.order):
                if not self.scheduler.adopt(sequence, arriving):
                    break
                handoff.waiting.remove(sequence)
                handoff.copying.append(sequence)
                self.handoffs.adopted_tokens += count
            if len(handoff.copying) == before:
                continue
            self.handoffs.adopted += 1
            if handoff.waiting and not self.directory.enabled:
                continue
            # The rest find the prompt in the prefix cache once the first one has decoded.
            self._prefill_here(handoff)

    def _prefill_here(self, handoff: _Handoff) -> None:
        """Queue what still waits for a prompt here."""
        self.scheduler.waiting.extend(handoff.waiting)
        handoff.waiting = []
        self._close_unwanted(handoff)

    def _close_copied(self) -> None:
        for handoff in list(self._handoffs.values()):
            if handoff.copying:
                handoff.copying = [sequence for sequence in handoff.copying if sequence.arriving]
                self._close_unwanted(handoff)

    def _close_unwanted(self, handoff: _Handoff) -> None:
        if not handoff.waiting and not handoff.copying:
            self._close_handoff(handoff)

    def _close_handoff(self, handoff: _Handoff) -> None:
        del self._handoffs[handoff.number]
        if not handoff.sent or self.handoffs.reason:
            return
        self._free_slots += 1
        try:
            self.prefill.send(Drop(handoff.number))
        except PrefillLost as lost:
            self._give_up(str(lost))

    def _give_up(self, reason: str, quiet: bool = False) -> None:
        """From now on everything is prefilled here; what is finished can still be taken over, for it stays mapped."""
        if self.handoffs.reason:
            return
        self.handoffs.reason = reason
        self.prefill.close()
        under_way = [h for h in self._handoffs.values() if h.ready is None]
        self.handoffs.lost += len(under_way)
        if not quiet:
            logger.warning(
                "the prefilling process %s; %d prompts that it had, and all others, are prefilled here",
                reason,
                len(under_way),
            )
        self._adopt_ready()
        for handoff in list(self._handoffs.values()):
            self._prefill_here(handoff)
