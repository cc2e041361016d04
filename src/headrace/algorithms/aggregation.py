"""From token losses to one number, as a sum and its denominator.

Invariant: over any partition of a batch the sums add up and so do the denominators, therefore gradients can
be taken piece by piece and divided once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


def aggregate(loss: Tensor, lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """The unnormalised sum of token losses.

    * `token`: Σ_i Σ_t l_it, of the one token mean over the batch (DAPO, arXiv 2503.14476, equation 8).
    * `sequence`: Σ_i (1/|y_i|) Σ_t l_it, of the mean over sequences (GRPO, arXiv 2402.03300, equation 3).
    * `constant`: Σ_i Σ_t l_it, of the mean over sequences of their sums over one length (Dr.GRPO, arXiv 2503.20783).

    Args:
        loss: [T], token losses.
        lengths: [T], the number of sampled tokens |y_i| in the sequence that each token belongs to.

    Returns:
        A scalar; the mean is its sum over the batch divided by `denominator` of the batch.
    """
    return (loss / lengths).sum() if aggregation == "sequence" else loss.sum()


def denominator(lengths: Sequence[int], aggregation: Aggregation, max_length: int | None = None) -> int:
    """What the sums are divided by: all sampled tokens (`token`), the number of sequences (`sequence`), or that number
    times `max_length` (`constant`).

    Args:
        lengths: |y_i| of every sequence in the loss, those with advantage 0 included, masked ones left out.
        max_length: L_max, needed with `constant`.
    """
    match aggregation:
        case "token":
            return sum(lengths)
        case "sequence":
            return len(lengths)
        case "constant":
            if max_length is None:
                raise ValueError("a constant length needs its value")
            return len(lengths) * max_length
