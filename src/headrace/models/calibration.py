"""What goes into each linear layer: the largest magnitude of every input channel, which int8 weights are scaled by.

Outlying channels are a property of the weights much more than of the text (SmoothQuant, arXiv 2211.10438, section
3), so random tokens show them and no data is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

CALIBRATION_TOKENS = 512


@torch.no_grad()
def input_peaks(module: PreTrainedModel, context_length: int) -> dict[str, Tensor]:
    """By name of a linear layer, max|x_j| over one forward of random tokens, [in_features].

    The tokens are the same at every call. Channels that no token reached (an expert's that was not chosen) are 0.
    """
    peaks: dict[str, Tensor] = {}

    def observe(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = inputs[0].detach().flatten(0, -2).abs().amax(0)
        peaks[name] = torch.maximum(peaks[name], found)

    hooks = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            peaks[name] = layer.weight.new_zeros(layer.in_features)
            hooks.append(layer.register_forward_pre_hook(partial(observe, name)))
    vocabulary = module.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    length = min(CALIBRATION_TOKENS, context_length)
    tokens = torch.randint(0, vocabulary, (1, length), generator=generator)
    try:
        with _own_attention(module):
            module(input_ids=tokens.to(module.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return peaks


@contextmanager
def _own_attention(module: PreTrainedModel) -> Iterator[None]:
    """Let the module attend by itself inside the block."""
    previous = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(previous)
