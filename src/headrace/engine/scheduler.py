"""Which sequences compute what in the next engine step: continuous batching with chunked prefill.

Invariants
* Every running sequence has a slot; every waiting one has none.
* The KV reserved for running sequences stays within the slots' capacity. When it would not, the least urgent
  running sequence is preempted: it goes back to the queue with its tokens and computes its KV again later.
* The most urgent sequence always makes progress, since the capacity holds at least one whole context.
* While anything decodes, a step copies at most `ARRIVING_TOKENS` of KV that comes from another engine.
* A prefix is prefilled once: a sequence whose prompt another one is prefilling right now waits for that KV.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from headrace.engine.sequence import ArrivingKV, EngineSequence, shared_prefix
from headrace.engine.slots import KVSlots
from headrace.state.directory import Directory

ARRIVING_TOKENS = 128
"""Tokens whose KV one step copies beside decoding: few enough not to be felt."""


@dataclass(slots=True)
class Plan:
    """One engine step: sequences that decode one token, and chunks (sequence, tokens) to prefill."""

    decodes: list[EngineSequence] = field(default_factory=list)
    chunks: list[tuple[EngineSequence, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks


class Scheduler:
    """The engine's queue and its running set.

    Args:
        max_batch_tokens: the most tokens of one step; at least one per running sequence.
    """

    def __init__(self, slots: KVSlots, directory: Directory, max_batch_tokens: int) -> None:
        self.slots = slots
        self.directory = directory
        self.max_batch_tokens = max(max_batch_tokens, slots.max_sequences)
        self.running: list[EngineSequence] = []
        self.waiting: list[EngineSequence] = []
        self.preemptions = 0

    def add(self, sequence: EngineSequence) -> None:
        self.waiting.append(sequence)

    def find(self, request_id: Hashable) -> EngineSequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request_id == request_id), None)

    def remove(self, sequence: EngineSequence) -> None:
        """Take a finished or aborted sequence out."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._free(sequence)

    def preempt(self, sequence: EngineSequence) -> None:
        """Send a running sequence back to the queue; its KV is given up."""
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Decide the next step. Slots are reserved and cached prefixes copied in here."""
        plan = Plan()
        budget = self.max_batch_tokens
        self.running.sort(key=lambda s: s.order)
        self._take_arriving()
        for sequence in list(self.running):
            if sequence.slot is None or sequence.arriving:
                continue  # preempted for a more urgent one in this very loop, or not here yet
            if sequence.pending == 1 and self._reserve(sequence, len(sequence.token_ids)):
                plan.decodes.append(sequence)
                budget -= 1
        for sequence in list(self.running):
            if sequence.slot is None or sequence.arriving or sequence.pending <= 1 or budget <= 0:
                continue
            budget -= self._add_chunk(plan, sequence, budget)
        # What was preempted above computes nothing in this step, even if it is admitted again below.
        plan.decodes = [s for s in plan.decodes if s.slot is not None]
        plan.chunks = [(s, tokens) for s, tokens in plan.chunks if s.slot is not None]
        self._admit(plan, budget)
        return plan

    def adopt(self, sequence: EngineSequence, arriving: ArrivingKV) -> bool:
        """Run a sequence that is not held here over KV from elsewhere, which the next plans copy.

        Returns:
            False, and nothing has happened, while there is no room for it or a more urgent one waits for room.
        """
        full = self.slots.used == self.slots.max_sequences
        if full or not self.slots.can_grow(len(sequence.token_ids) + 1):
            return False
        if any(other.order < sequence.order for other in self.waiting):
            return False
        self._start(sequence)
        sequence.arriving = arriving
        return True

    def _start(self, sequence: EngineSequence) -> None:
        """Give a sequence a slot, and room for all of it: several admissions could else fill the memory with halves.

        Room comes before anything is written: rows that no slot has reserved may be given back to the system.
        """
        sequence.slot = self.slots.take()
        self.slots.grow(sequence.slot, len(sequence.token_ids))
        self.running.append(sequence)

    def _take_arriving(self) -> None:
        """Copy some KV of the most urgent sequences that wait for it; all of it if nothing else is running."""
        here = any(not sequence.arriving for sequence in self.running)
        budget = ARRIVING_TOKENS if here else sum(self.slots.lengths)
        for sequence in self.running:
            arriving = sequence.arriving
            if arriving is None or not budget:
                continue
            assert sequence.slot is not None
            count = min(budget, arriving.count - sequence.computed)
            rows = [tensor[:, sequence.computed :] for tensor in arriving.rows]
            self.slots.write(sequence.slot, sequence.computed, rows, count)
            sequence.computed += count
            budget -= count
            if sequence.computed == arriving.count:
                sequence.arriving = None

    def _admit(self, plan: Plan, budget: int) -> None:
        self.waiting.sort(key=lambda s: s.order)
        for sequence in list(self.waiting):
            if budget <= 0 or self.slots.used == self.slots.max_sequences:
                return
            if not self.slots.can_grow(len(sequence.token_ids) + 1):
                # A less urgent, shorter one must not overtake: that would starve long prompts.
                return
            if self._shares_a_prefill(sequence):
                continue
            self.waiting.remove(sequence)
            self._start(sequence)
            self._load_prefix(sequence)
            if sequence.pending == 1:
                plan.decodes.append(sequence)
                budget -= 1
            else:
                budget -= self._add_chunk(plan, sequence, budget)

    def _add_chunk(self, plan: Plan, sequence: EngineSequence, budget: int) -> int:
        tokens = min(sequence.pending, budget)
        if not self._reserve(sequence, sequence.computed + tokens):
            return 0
        plan.chunks.append((sequence, tokens))
        return tokens

    def _reserve(self, sequence: EngineSequence, length: int) -> bool:
        """Reserve KV up to `length`, preempting less urgent sequences; False when this one had to yield."""
        assert sequence.slot is not None
        while not self.slots.can_grow(length - self.slots.lengths[sequence.slot]):
            victim = max(self.running, key=lambda s: s.order)
            self.preemptions += 1
            self.preempt(victim)
            if victim is sequence:
                return False
        self.slots.grow(sequence.slot, length)
        return True

    def _load_prefix(self, sequence: EngineSequence) -> None:
        """Copy the longest cached prefix into the slot. The last token is always computed: its logits are needed."""
        assert sequence.slot is not None
        tokens = sequence.token_ids
        restored = self.directory.restore(tokens, self.slots.rows(sequence.slot), len(tokens) - 1)
        sequence.computed = restored.length
        sequence.continues = restored.waiting

    def _shares_a_prefill(self, sequence: EngineSequence) -> bool:
        """Whether a running sequence is prefilling a prompt that saves this one at least a block."""
        if not self.directory.enabled:
            return False
        longest = 0
        for other in self.running:
            if other.prompt_cached or other.computed >= other.prompt_length:
                continue
            longest = max(
                longest, shared_prefix(sequence.token_ids[:-1], other.token_ids[: other.prompt_length])
            )
        block_size = self.directory.cache.block_size
        if longest < block_size:
            return False
        found = self.directory.matched_length(sequence.token_ids, len(sequence.token_ids) - 1)
        return longest - found >= block_size

    def _free(self, sequence: EngineSequence) -> None:
        assert sequence.slot is not None
        slot = sequence.slot
        moved = self.slots.free(slot)
        if moved is not None:
            owner = next(s for s in self.running if s.slot == moved)
            owner.slot = slot
        sequence.drop_kv()
