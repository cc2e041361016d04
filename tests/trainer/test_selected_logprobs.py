"""The log-probs of chosen ids and their hand-written gradient."""

from __future__ import annotations

import torch

from headrace.trainer import logprobs
from headrace.trainer.logprobs import selected_logprobs


def test_values_and_gradient_are_those_of_log_softmax(monkeypatch) -> None:
    monkeypatch.setattr(logprobs, "SLICE_ROWS", 3)
    torch.manual_seed(0)
    rows = torch.tensor([0, 0, 0, 1, 4, 6, 6, 5])  # row 0 shared, 2 and 3 unused
    targets = torch.tensor([1, 2, 1, 0, 4, 3, 2, 4])
    temperatures = torch.tensor([1.0, 0.7, 1, 1, 1.3, 2, 1], dtype=torch.float64)
    weights = torch.randn(8, dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logits = (4 * torch.randn(7, 5, dtype=torch.float64)).to(dtype).requires_grad_()
        logp = selected_logprobs(logits, rows, targets, temperatures)
        expected = torch.log_softmax(logits / temperatures[:, None].to(dtype), -1)[rows, targets]
        assert logp.dtype == dtype
        assert (logp - expected).abs().max() < tolerance
        (gradient,) = torch.autograd.grad((weights * logp).sum(), logits)
        (expected_gradient,) = torch.autograd.grad((weights * expected).sum(), logits)
        assert (gradient - expected_gradient).abs().max() < tolerance


def test_half_precision_logits_give_float32() -> None:
    logits = torch.randn(2, 9).bfloat16()
    logp = selected_logprobs(logits, torch.tensor([1]), torch.tensor([4]), torch.ones(2))
    assert logp.dtype == torch.float32
    assert torch.allclose(logp, torch.log_softmax(logits.float(), -1)[1, 4], atol=1e-6)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0]], requires_grad=True)
    logp = selected_logprobs(logits, torch.tensor([0]), torch.tensor([0]), torch.ones(1))
    logp.sum().backward()
    assert logp.item() == 0
    assert logits.grad.isfinite().all()
