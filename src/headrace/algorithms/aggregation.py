"""From token losses to one number, as a sum and its denominator.

Invariant: over any partition of a batch the sums add up and so do the denominators, therefore gradients can
be taken piece by piece and divided once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

Aggregation = Literal["token", "sequence"]


def aggregate(loss: Tensor, lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """The unnormalised sum of token losses.

    * `token`: Σ_i Σ_t l_it, of the one token mean over the batch (DAPO, arXiv 2503.14476, equation 8).
    * `sequence`: Σ_i (1/|y_i|) Σ_t l_it, of the mean over sequences (GRPO, arXiv 2402.03300, equation 3).

    Args:
        loss: [T], token losses; a sequence's tokens are all here or not at all.
        lengths: [T], the number of sampled tokens |y_i| in the sequence that each token belongs to.

    Returns:
        A scalar; the mean is its sum over the batch divided by `denominator` of the batch.
    """
    return loss.sum() if aggregation == "token" else (loss / lengths).sum()


def denominator(lengths: Sequence[int], aggregation: Aggregation) -> int:
    """What the sums are divided by: all sampled tokens (`token`), or the number of sequences (`sequence`).

    Args:
        lengths: |y_i| of every sequence in the loss, those with advantage 0 included, masked ones left out.
    """
    return sum(lengths) if aggregation == "token" else len(lengths)
