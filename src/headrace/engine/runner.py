"""Runs one plan: a single forward over decoding tokens and prefill chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.attention import Chunk, LayerProbe, SlotAttention
from headrace.engine.forward import Forward
from headrace.engine.scheduler import Plan
from headrace.engine.sequence import EngineSequence
from headrace.engine.slots import KVSlots, LayerShape
from headrace.models.attention import AttentionBackend


class Runner:
    """The forward pass of the engine."""

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self.forward = forward
        self.device = device

    @torch.inference_mode()
    def layer_shapes(self) -> list[LayerShape]:
        """What each layer's keys and values look like, from a forward of one token."""
        probe = LayerProbe()
        self._logits([0], [0], [0], probe)
        return [probe.shapes[layer] for layer in sorted(probe.shapes)]

    @torch.inference_mode()
    def run(self, plan: Plan, slots: KVSlots) -> tuple[list[EngineSequence], Tensor]:
        """Compute the plan's tokens into the slots.

        Returns:
            The sequences that now have a next token to draw, and their logits [R, V].
        """
        decode_slots = [_slot(s) for s in plan.decodes]
        order = sorted(range(len(decode_slots)), key=decode_slots.__getitem__)
        decodes = [plan.decodes[i] for i in order]
        token_ids = [s.token_ids[-1] for s in decodes]
        positions = [len(s.token_ids) - 1 for s in decodes]
        ready = list(decodes)
        rows = list(range(len(decodes)))
        chunks: list[Chunk] = []
        for sequence, count in plan.chunks:
            start, stop = sequence.computed, sequence.computed + count
            chunks.append(Chunk(_slot(sequence), start, stop, len(token_ids)))
            token_ids.extend(sequence.token_ids[start:stop])
            positions.extend(range(start, stop))
            if stop == len(sequence.token_ids):
                ready.append(sequence)
                rows.append(len(token_ids) - 1)
        backend = SlotAttention(slots, [_slot(s) for s in decodes], positions[: len(decodes)], chunks)
        logits = self._logits(token_ids, positions, rows or [0], backend)
        for sequence in decodes:
            sequence.computed += 1
        for sequence, count in plan.chunks:
            sequence.computed += count
        return ready, logits[: len(rows)]

    def _logits(
        self, token_ids: list[int], positions: list[int], rows: list[int], backend: AttentionBackend
    ) -> Tensor:
        return self.forward(
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            torch.tensor(rows, device=self.device),
            backend,
        )


def _slot(sequence: EngineSequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
