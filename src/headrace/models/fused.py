"""Parts of a model that train in headrace's kernels instead of PyTorch's single operations.

Modules keep their parameters, names and classes' names; only their forward is another one, in float32 on the CPU.

Invariant: a part is replaced only if it computes the very formula that stands in for it, which is tried, not guessed
from its name.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from headrace import kernels
from headrace.models.linear import suits_onednn, use_onednn


def use_kernels(module: nn.Module) -> None:
    """Let linear layers, RMSNorms and SwiGLUs inside a float32 CPU module run in faster kernels, in place."""
    use_onednn(module)
    if not suits_onednn(module) or not kernels.available():
        return
    for part in module.modules():
        if isinstance(part, _Fused):
            continue
        for fused, fits in ((_RMSNorm, _is_rms_norm), (_SwiGLU, _is_swiglu)):
            if fits(part):
                part.__class__ = _with(fused, type(part))


class _Fused(nn.Module):
    """Stands before a part's own class."""

    def forward(self, x: Tensor) -> Tensor:
        # The plain way stays for whatever the kernels do not know: another precision, another device.
        return self.fused(x) if kernels.suits(x) else super().forward(x)  # type: ignore[misc]

    def fused(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _RMSNorm(_Fused):
    def fused(self: Any, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.variance_epsilon)


class _SwiGLU(_Fused):
    def fused(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(kernels.swiglu(self.gate_proj(x), self.up_proj(x)))


@cache
def _with(fused: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    return type(original.__name__, (fused, original), {"__module__": original.__module__})


@torch.no_grad()
def _is_rms_norm(part: Any) -> bool:
    if not type(part).__name__.endswith("RMSNorm") or set(dict(part.named_parameters())) != {"weight"}:
        return False
    epsilon = getattr(part, "variance_epsilon", None)
    if not isinstance(epsilon, float) or part.weight.dim() != 1:
        return False
    x, weight = _probe(4, len(part.weight)), _probe(1, len(part.weight))[0]
    return _agree(functional_call(part, {"weight": weight}, (x,)), kernels.rms_norm(x, weight, epsilon))


@torch.no_grad()
def _is_swiglu(part: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    children = {name for name, _ in part.named_children()} - {"act_fn"}
    if not type(part).__name__.endswith("MLP") or children != set(names):
        return False
    if not all(isinstance(getattr(part, name), nn.Linear) for name in names):
        return False
    # Weights of our own, so that no initialisation hides a difference, and large enough to meet any clamp.
    own = {
        name: _probe(*p.shape) if p.dim() == 2 else _probe(1, len(p))[0]
        for name, p in part.named_parameters()
    }
    x = 50 * _probe(4, part.gate_proj.in_features)
    gate, up, down = (partial(F.linear, weight=own[f"{n}.weight"], bias=own.get(f"{n}.bias")) for n in names)
    return _agree(functional_call(part, own, (x,)), down(kernels.swiglu(gate(x), up(x))))


def _probe(rows: int, columns: int) -> Tensor:
    """Random numbers whose products with one another are of the order of 1; the same at every call."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-5 * theirs.norm())
