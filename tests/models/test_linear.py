"""oneDNN linear layers give nn.Linear's outputs and gradients."""

import pytest
import torch
from torch import nn

from headrace.models.linear import OneDNNLinear, use_onednn


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 33)])
def test_outputs_and_gradients_equal_those_of_a_plain_layer(bias: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    fast = nn.Linear(24, 40, bias=bias)
    fast.load_state_dict(plain.state_dict())
    use_onednn(fast)
    assert type(fast) is OneDNNLinear
    x = torch.randn(*shape, 24)
    weights = torch.randn(*shape, 40)
    results = []
    for layer in (plain, fast):
        inputs = x.clone().requires_grad_()
        output = layer(inputs)
        (output * weights).sum().backward()
        results.append([output, inputs.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_other_precisions_are_left_alone() -> None:
    layer = nn.Linear(4, 4).double()
    use_onednn(layer)
    assert type(layer) is nn.Linear
