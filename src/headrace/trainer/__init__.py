"""Groups in, weights out: shared-prompt packing, the loss, the optimizer, checkpoints.

Invariant: a packed step gives the loss and the gradients of the unpacked one.
"""

from headrace.trainer.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from headrace.trainer.packing import MicroBatch, pack
from headrace.trainer.statistics import Divergence, TokenStatistics
from headrace.trainer.trainer import GradientResult, StepResult, Trainer

__all__ = [
    "Divergence",
    "GradientResult",
    "MicroBatch",
    "StepResult",
    "TokenStatistics",
    "Trainer",
    "load_checkpoint",
    "pack",
    "save_checkpoint",
    "verify_checkpoint",
]
