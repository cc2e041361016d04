"""AdamW and its learning rate.

Invariants
* The learning rate is a function of the step alone, so that a resume needs no scheduler state.
* Optimizer state is exchanged under parameter names, never under positions.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from headrace.config import TrainerConfig
from headrace.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter: two moments of its shape and the number of its updates."""


def learning_rate_at(config: TrainerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total_steps`.

    The warm-up rises linearly and never is 0: step s of w warm-up steps has (s + 1) / (w + 1) of the peak.
    After it, `linear` and `cosine` fall towards 0, which they would reach at step `total_steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate


def make_adamw(module: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW, fused where PyTorch can. Biases and norms (one dimension) have no weight decay."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    make = partial(torch.optim.AdamW, groups, config.learning_rate, config.betas, config.eps)
    try:
        return make(fused=True)
    except RuntimeError:  # no fused kernel for this device
        return make()


def adopt_settings(optimizer: torch.optim.AdamW, config: TrainerConfig) -> None:
    """Give an AdamW of `make_adamw` the betas, ε and weight decay of other settings; moments stay."""
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = config.betas, config.eps
        group["weight_decay"] = config.weight_decay if group["params"][0].ndim >= 2 else 0.0


def export_moments(optimizer: torch.optim.AdamW, module: nn.Module) -> dict[str, Tensor]:
    """AdamW's state as `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`, for parameters ever updated."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def import_moments(optimizer: torch.optim.AdamW, module: nn.Module, moments: dict[str, Tensor]) -> None:
    """Replace AdamW's state by copies of what `export_moments` gave.

    Raises:
        UserError: a moment belongs to no parameter, has another shape, or is missing; nothing was changed.
    """
    state: dict[Tensor, dict[str, Tensor]] = {}
    left = set(moments)
    for name, parameter in module.named_parameters():
        keys = {moment: f"{name}.{moment}" for moment in MOMENTS}
        present = [key for key in keys.values() if key in moments]
        if not present:
            continue
        shapes = [moments[key].shape for key in present]
        if len(present) < len(MOMENTS) or shapes != [parameter.shape, parameter.shape, torch.Size()]:
            raise UserError(
                f"the optimizer state of {name} does not fit the model; resume with the run's own model"
            )
        left.difference_update(present)
        state[parameter] = {
            moment: moments[key].to(device=parameter.device, copy=True) for moment, key in keys.items()
        }
    if left:
        raise UserError(
            f"the optimizer state has moments for {min(left)}, which the model lacks; "
            "resume with the run's own model"
        )
    optimizer.state.clear()
    optimizer.state.update(state)
