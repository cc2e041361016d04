"""An inference replica: the same module, with its linear layers in the device's own layout.

The replica shares every parameter and buffer with the module it was made from; only linear weights are held a
second time, in the layout that oneDNN multiplies fastest. After the trainer changed the weights, `repack`
brings those copies up to date.

Invariant: between `repack` and the next change of the module's parameters, replica and module compute the same
function to within rounding.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from headrace.models.linear import OneDNNLinear, suits_onednn


class PackedLinear(nn.Module):
    """A linear layer whose weight [out, in] is kept prepacked for the CPU. float32 only, no gradient."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.repack()

    def repack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def inference_replica(module: nn.Module, prepack: bool = True) -> nn.Module:
    """A copy of `module`'s structure over the same tensors, prepacked where that is faster."""
    tensors = [*module.parameters(), *module.buffers()]
    replica = copy.deepcopy(module, memo={id(tensor): tensor for tensor in tensors})
    replica.eval()
    if prepack and suits_onednn(module):
        _replace_linears(replica)
    return replica


@torch.no_grad()
def repack(replica: nn.Module) -> None:
    """Bring the prepacked weights up to date with the parameters."""
    for layer in replica.modules():
        if isinstance(layer, PackedLinear):
            layer.repack()


@torch.no_grad()
def _replace_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) in (nn.Linear, OneDNNLinear):
            setattr(module, name, PackedLinear(child))
        else:
            _replace_linears(child)
