"""One engine step's tokens, as every forward takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill of positions `start … stop-1` of one slot; its rows begin at `row` in the batch."""

    slot: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class Batch:
    """N tokens: those of the decoding sequences first (one each, by ascending slot), then the chunks.

    Attributes:
        token_ids, positions: N each; a position is the token's place in its own sequence.
        decode_slots: the slot of each decoding sequence.
        chunks: the rest.
        outputs: R rows whose logits are wanted.
        prompts: per decoding sequence its prompt, one object for equal prompts; None if its KV is its own alone.
    """

    token_ids: list[int]
    positions: list[int]
    decode_slots: list[int]
    chunks: list[Chunk]
    outputs: list[int]
    prompts: list[tuple[int, ...] | None]

    @property
    def slots(self) -> list[int]:
        """N, the slot of each token."""
        return [*self.decode_slots, *(c.slot for c in self.chunks for _ in range(c.start, c.stop))]
