"""Every architecture's packed loss, log-probs and gradients equal those of its sequences one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from packing_cases import (
    TOLERANCE,
    assert_equal_gradients,
    exact_norms,
    make_trainer,
    plain_logprobs,
    ragged_groups,
)

from architectures import ARCHITECTURES, plain_module

ROUNDED_TOLERANCE = 1e-6
"""Where a router or a norm rounds to float32, the gradients of a packed prompt and of its copies differ by that."""


def test_gradients(name: str) -> None:
    """Against dense attention in float64; transformers' own takes its softmax in float32."""
    tolerance = TOLERANCE if ARCHITECTURES[name].exact else ROUNDED_TOLERANCE
    trainer = make_trainer(exact_norms(copy.deepcopy(plain_module(name))))
    assert_equal_gradients(trainer, ragged_groups(), "plain_for_tests", tolerance)


def test_log_probs(name: str) -> None:
    """1e-5: transformers' eager attention rounds its weights to float32."""
    module = copy.deepcopy(plain_module(name))
    samples = [sample for group in ragged_groups() for sample in group]
    packed = make_trainer(module).token_logprobs(samples)
    with torch.no_grad():
        for sample, logprobs in zip(samples, packed, strict=True):
            eager = [logp.item() for logp in plain_logprobs(module, sample, "eager")]
            assert logprobs == pytest.approx(eager, abs=1e-5)
