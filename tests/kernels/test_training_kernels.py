"""The training kernels' values and gradients against the formulas, written with PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from headrace import kernels
from headrace.models.fused import use_kernels

pytestmark = pytest.mark.kernels

SEGMENTS = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=3).map(
    lambda segments: [[max(1, lengths[0]), *lengths[1:]] for lengths in segments]
)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: list[list[int]], scaling: float, window: int | None
) -> Tensor:
    """Every response alone with its prompt."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    outputs = torch.zeros_like(query)
    start = 0
    for lengths in segments:
        prompt = range(start, start + lengths[0])
        offset = start
        for length in lengths:
            piece = range(offset, offset + length)
            before = [] if offset == start else list(prompt)
            rows = torch.tensor([*before, *piece])
            positions = torch.arange(len(rows))
            distance = positions[:, None] - positions[None]
            allowed = (distance >= 0) & (distance < (window or len(rows) + 1))
            scores = query[:, rows] @ key[:, rows].transpose(1, 2) * scaling
            weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
            outputs[:, list(piece)] = (weights @ value[:, rows])[:, len(before) :]
            offset += length
        start = offset
    return outputs


@settings(deadline=None, max_examples=40)
@given(
    segments=SEGMENTS,
    dim=st.sampled_from([16, 48, 64, 128]),
    groups=st.integers(1, 3),
    window=st.sampled_from([None, 1, 5, 17]),
    seed=st.integers(0, 100),
)
def test_packed_attention(
    segments: list[list[int]], dim: int, groups: int, window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(map(sum, segments))

    def states(heads: int) -> Tensor:
        # Token by token in memory, as a projection leaves it.
        return torch.randn(tokens, heads, dim, generator=generator).transpose(0, 1)

    query, key, value, up = states(2 * groups), states(2), states(2), states(2 * groups)
    inputs = [t.clone().requires_grad_() for t in (query, key, value)]
    layout = kernels.PackedLayout(segments)
    assert layout.tokens == tokens
    ours = kernels.packed_attention(*inputs, layout, 0.3, window)
    exact = [t.double().requires_grad_() for t in (query, key, value)]
    theirs = plain_attention(*exact, segments, 0.3, window)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    ours.backward(up)
    theirs.backward(up.double())
    for mine, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 9), (33, 48, 50), (20, 1500, 100), (100, 2100, 49)])
def test_weight_gradient(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    torch.manual_seed(0)
    gradient, x = torch.randn(m, n), torch.randn(m, k)
    expected = gradient.double().T @ x.double()
    ours = kernels.weight_gradient(gradient, x)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(kernels.weight_gradient(gradient, x), ours)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [1, 16, 33, 576])
def test_rms_norm(width: int) -> None:
    torch.manual_seed(0)
    x, weight, up = torch.randn(3, 5, width), torch.randn(width), torch.randn(3, 5, width)
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    up = up.transpose(0, 1).contiguous().transpose(0, 1)  # as a head's norm gets it: not in one piece
    result = kernels.rms_norm(*ours, 1e-5)
    expected = exact[1] * exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    result.backward(up)
    expected.backward(up.double())
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 16, 33, 5000])
def test_swiglu(width: int) -> None:
    torch.manual_seed(0)
    gate, up, gradient = (torch.randn(4, width) * 5 for _ in range(3))
    extremes = torch.tensor([-1e9, -1e4, -177.5, -177.44, -100.0, -90.0, -88.6, 90.0, 1e9])[:width]
    gate[1, : len(extremes)] = extremes
    ours = [t.clone().requires_grad_() for t in (gate, up)]
    exact = [t.double().requires_grad_() for t in (gate, up)]
    result = kernels.swiglu(*ours)
    expected = nn.functional.silu(exact[0]) * exact[1]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    result.backward(gradient)
    expected.backward(gradient.double())
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)


def test_softmax_and_its_normaliser() -> None:
    torch.manual_seed(0)
    logits, temperatures = torch.randn(5, 1003) * 20, torch.tensor([0.5, 1.0, 1.0, 2.0, 1.3])
    normalisers = kernels.log_sum_exp(logits, temperatures)
    scaled = logits.double() / temperatures.double()[:, None]
    torch.testing.assert_close(normalisers.double(), scaled.logsumexp(-1), rtol=1e-6, atol=1e-5)
    factors = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5])
    out = logits.clone()
    kernels.scaled_softmax(out, temperatures, normalisers, factors, out)
    torch.testing.assert_close(
        out.double(), scaled.softmax(-1) * factors.double()[:, None], rtol=1e-4, atol=1e-6
    )
    logits[4, :7] = -torch.inf
    torch.testing.assert_close(
        kernels.log_sum_exp(logits, temperatures)[4].double(),
        (logits[4].double() / 1.3).logsumexp(-1),
        rtol=1e-6,
        atol=1e-5,
    )
    logits[0] = -torch.inf
    logits[2, 1001] = torch.nan
    logits[3, 4] = torch.inf
    finite = kernels.log_sum_exp(logits, temperatures).isfinite()
    assert finite.tolist() == [False, True, False, False, True]


class _ShiftedRMSNorm(nn.Module):
    """Gemma's: one is added to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def test_only_what_computes_the_same_is_replaced() -> None:
    shifted = _ShiftedRMSNorm()
    use_kernels(shifted)
    assert type(shifted) is _ShiftedRMSNorm
    x = torch.randn(2, 16)
    assert shifted(x).norm() > 1
    config = LlamaConfig(hidden_size=32, intermediate_size=48)
    for activation, fused in (("silu", True), ("gelu_pytorch_tanh", False)):
        mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48, hidden_act=activation))
        nn.init.zeros_(mlp.down_proj.weight)  # which would make any two of them agree
        use_kernels(mlp)
        assert (type(mlp) is not LlamaMLP) is fused
    clamped = _ClampedMLP(config)
    use_kernels(clamped)
    assert type(clamped) is _ClampedMLP


class _ClampedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x).clamp(-7, 7))
