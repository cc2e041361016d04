"""An inference replica: the same module, with its linear layers in the device's own layout.

The replica shares every parameter and buffer with the module it was made from; only linear weights are held a
second time: in the layout that oneDNN multiplies fastest, or as int8. After the trainer changed the weights,
`repack` brings those copies up to date. Weights that come from elsewhere are packed beside the current ones
(`pack_beside`) and taken into use in one short moment (`use_packed`, with `assign` for all that is not packed).

Invariants
* Between `repack` and the next change of the module's parameters, replica and module compute the same function, to
  within rounding: that of float32, or that of int8.
* `pack_beside` changes nothing that a forward reads, so it may run in another thread meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels import Linear, PackedWeight
from headrace.models.linear import OneDNNLinear, multiply, suits_onednn


class PackedLinear(nn.Module):
    """A linear layer whose weight [out, in] is kept prepacked for the CPU. float32 only, no gradient."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.repack()

    def repack(self) -> None:
        self.packed = self.pack(self.weight, self.bias)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What `packed` is for other parameters."""
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.packed, self.bias)


class Int8Linear(nn.Module):
    """A linear layer whose weight is kept as int8. Takes and gives float32 on the CPU, no gradient.

    Args:
        input_peaks: [in], the largest magnitude of each input channel.
    """

    def __init__(self, linear: nn.Linear, input_peaks: Tensor) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = PackedWeight([linear], input_peaks)

    def repack(self) -> None:
        self.packed.repack()

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        """What `packed` is for other parameters."""
        return PackedWeight([Linear(weight, bias)], self.packed.input_peaks)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


def inference_replica(
    module: nn.Module, prepack: bool = True, peaks: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """A copy of `module`'s structure over the same tensors, prepacked where that is faster.

    Args:
        peaks: by name of a linear layer the largest magnitude of its input channels; given, linear layers become int8.
            Those of indexers stay as they are: rounding there changes what a token attends to.
    """
    tensors = [*module.parameters(), *module.buffers()]
    replica = copy.deepcopy(module, memo={id(tensor): tensor for tensor in tensors})
    replica.eval()
    if prepack and suits_onednn(module):
        _replace_linears(replica, peaks or {}, "")
    return replica


@torch.no_grad()
def repack(replica: nn.Module) -> None:
    """Bring the prepacked weights up to date with the parameters."""
    for layer in replica.modules():
        if isinstance(layer, PackedLinear | Int8Linear):
            layer.repack()


Packs = dict[str, Any]
"""The packed weights of a replica's linear layers, by name."""


@torch.no_grad()
def pack_beside(replica: nn.Module, tensors: Mapping[str, Tensor]) -> Packs:
    """The packed form that `replica` would have with other weights, by name as in the module's state dict."""
    return {
        name: layer.pack(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
        for name, layer in replica.named_modules()
        if isinstance(layer, PackedLinear | Int8Linear)
    }


def use_packed(replica: nn.Module, packs: Packs) -> Packs:
    """Take `packs` into use; returns what was used before."""
    before = {}
    for name, packed in packs.items():
        layer: Any = replica.get_submodule(name)
        before[name], layer.packed = layer.packed, packed
    return before


def assign(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Let parameters and buffers, the items of a `state_dict(keep_vars=True)`, show other memory; nothing is copied."""
    for name, target in targets.items():
        target.data = tensors[name]


@torch.no_grad()
def _replace_linears(module: nn.Module, peaks: Mapping[str, Tensor], prefix: str) -> None:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(child) in (nn.Linear, OneDNNLinear):
            quantised = path in peaks and "indexer" not in path.split(".")
            setattr(module, name, Int8Linear(child, peaks[path]) if quantised else PackedLinear(child))
        else:
            _replace_linears(child, peaks, path)
