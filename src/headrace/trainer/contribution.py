"""One cell's part of a step: the gradient sum over some groups, as tensors and as bytes.

Invariants
* Parts are added in the order in which they are given: the same parts in the same order give the same bits.
* What is read back is exactly what was written; damaged bytes are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.errors import RunError
from headrace.measures import GradientResult

_RESULT = "result"


@dataclass(frozen=True, slots=True)
class Exported:
    """A gradient sum that has left its trainer.

    Attributes:
        gradients: unnormalised sums by the parameter's name, in its dtype; empty if no gradient was run.
        result: the sums that belong to them, the denominator among them.
    """

    gradients: dict[str, Tensor]
    result: GradientResult

    def to_bytes(self) -> bytes:
        """In safetensors' format, with `result` in its metadata."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.gradients.items()}
        return safetensors.torch.save(tensors, {_RESULT: json.dumps(self.result.to_dict(), allow_nan=False)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What `to_bytes` wrote.

        Raises:
            RunError: it is damaged, or something else.
        """
        try:
            tensors = safetensors.torch.load(data)
            # The library reads metadata from files only; the header is its length in 8 bytes, then JSON.
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            result = GradientResult.from_dict(json.loads(header["__metadata__"][_RESULT]))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"a gradient contribution cannot be read: {error!r}") from error
        return cls(tensors, result)


def total(parts: Sequence[Exported]) -> Exported:
    """The parts' sum, added in their order, in tensors of its own."""
    gradients: dict[str, Tensor] = {}
    result = GradientResult()
    for part in parts:
        for name, tensor in part.gradients.items():
            if name in gradients:
                gradients[name].add_(tensor)
            else:
                gradients[name] = tensor.clone()
        result.merge(part.result)
    return Exported(gradients, result)
