"""Runs one plan: a single forward over decoding tokens and prefill chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.batch import Batch, Chunk
from headrace.engine.forward import Forward
from headrace.engine.scheduler import Plan
from headrace.engine.sequence import EngineSequence
from headrace.engine.slots import KVSlots


class Runner:
    """The forward pass of the engine."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    @torch.inference_mode()
    def run(self, plan: Plan, slots: KVSlots) -> tuple[list[EngineSequence], Tensor]:
        """Compute the plan's tokens into the slots.

        Returns:
            The sequences that now have a next token to draw, and their logits [R, V].
        """
        decodes = sorted(plan.decodes, key=_slot)
        token_ids = [s.token_ids[-1] for s in decodes]
        positions = [len(s.token_ids) - 1 for s in decodes]
        ready = list(decodes)
        outputs = list(range(len(decodes)))
        chunks: list[Chunk] = []
        for sequence, count in plan.chunks:
            start, stop = sequence.computed, sequence.computed + count
            chunks.append(Chunk(_slot(sequence), start, stop, len(token_ids)))
            token_ids.extend(sequence.token_ids[start:stop])
            positions.extend(range(start, stop))
            if stop == len(sequence.token_ids):
                ready.append(sequence)
                outputs.append(len(token_ids) - 1)
        # KV that mixes weights is its sequence's own, whatever its tokens are.
        prompts = [None if s.mixed else s.prompt for s in decodes]
        batch = Batch(token_ids, positions, [_slot(s) for s in decodes], chunks, outputs, prompts)
        logits = self.forward(batch, slots)
        for sequence in decodes:
            sequence.computed += 1
        for sequence, count in plan.chunks:
            sequence.computed += count
        return ready, logits


def _slot(sequence: EngineSequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
