"""Groups in, weights out: shared-prompt packing, the loss, the optimizer, checkpoints.

Invariant: a packed step gives the loss and the gradients of the unpacked one.
"""

from headrace.trainer.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from headrace.trainer.contribution import Exported
from headrace.trainer.gradient import Batch
from headrace.trainer.packing import MicroBatch, pack
from headrace.trainer.statistics import divergence_of, token_statistics_of
from headrace.trainer.trainer import StepResult, Trainer

__all__ = [
    "Batch",
    "Exported",
    "MicroBatch",
    "StepResult",
    "Trainer",
    "divergence_of",
    "load_checkpoint",
    "pack",
    "save_checkpoint",
    "token_statistics_of",
    "verify_checkpoint",
]
