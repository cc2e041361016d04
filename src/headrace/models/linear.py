"""Linear layers that train through oneDNN.

PyTorch multiplies float32 matrices with MKL, which on some CPUs reaches half of what oneDNN does. The layers keep
their class's parameters and names, so saving, loading and tying weights are not affected.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace import kernels


class OneDNNLinear(nn.Linear):
    """`nn.Linear` whose three matrix products (forward, dX, dW) run in oneDNN. CPU, float32."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.float32 or self.weight.dtype != torch.float32:
            return F.linear(input, self.weight, self.bias)
        return _Product.apply(input, self.weight, self.bias)


def use_onednn(module: nn.Module) -> None:
    """Make every plain linear layer of a float32 CPU module a `OneDNNLinear`, in place; else do nothing."""
    if suits_onednn(module):
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = OneDNNLinear


def suits_onednn(module: nn.Module) -> bool:
    """Whether oneDNN is there and the module's parameters are float32 on the CPU."""
    parameter = next(module.parameters())
    suits = parameter.device.type == "cpu" and parameter.dtype == torch.float32
    return suits and torch.backends.mkldnn.is_available()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        # oneDNN reads transposed operands in place.
        grad_x = multiply(gradient, weight.t(), None) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            native = kernels.suits(rows, inputs)
            grad_weight = (
                kernels.weight_gradient(rows, inputs) if native else multiply(rows.t(), inputs.t(), None)
            )
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
