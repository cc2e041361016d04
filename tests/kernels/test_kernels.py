"""The kernels against PyTorch's operators, and what they promise beyond them: bits that depend on nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace.engine.sampler import sample
from headrace.kernels import PackedWeight, draw, input_smoothing, library
from headrace.locks import locked

pytestmark = pytest.mark.kernels


def linears(outputs: tuple[int, ...], inputs: int, bias: bool = False, seed: int = 0) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(inputs, n, bias=bias) for n in outputs]


def plain(layers: list[nn.Linear], x: Tensor) -> Tensor:
    return torch.cat([layer.double()(x.double()) for layer in layers], dim=-1).float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [((48,), 64), ((5, 100, 7), 33), ((1,), 1), ((96, 192), 576)])
@torch.inference_mode()
def test_a_packed_weight_is_its_linear_layers(outputs: tuple[int, ...], inputs: int, bias: bool) -> None:
    layers = linears(outputs, inputs, bias)
    packed = PackedWeight(layers)
    for rows in (1, 2, 7, 8, 9, 30):
        x = torch.randn(rows, inputs)
        ours = packed(x)
        torch.testing.assert_close(
            ours, torch.cat([layer(x) for layer in layers], dim=-1), rtol=1e-4, atol=1e-5
        )


@torch.inference_mode()
def test_int8_is_the_rounded_product() -> None:
    """Written out: inputs and weights smoothed, rounded with one scale per row, multiplied as integers."""
    layers = linears((40, 60), 50)
    x = torch.randn(6, 50) * torch.linspace(0.1, 30, 50)
    peaks = x.abs().amax(0)
    packed = PackedWeight(layers, peaks)
    weight = torch.cat([layer.weight for layer in layers])
    smooth = input_smoothing(peaks, [layer.weight for layer in layers])
    torch.testing.assert_close(smooth, (weight.abs().amax(0) / peaks).sqrt())
    scaled_x, scaled_w = x * smooth, weight / smooth
    scale_x = scaled_x.abs().amax(1, keepdim=True) / 127
    scale_w = scaled_w.abs().amax(1, keepdim=True) / 127
    product = (scaled_x / scale_x).round().double() @ (scaled_w / scale_w).round().double().T
    expected = (product * scale_x * scale_w.T).float()
    # A number on the edge between two integers may round either way: that is at most one unit of one product.
    unit = (scale_x * scale_w.T * 127).max().item()
    assert (packed(x) - expected).abs().max() <= 2 * unit
    assert (packed(x) - expected).abs().median() < 1e-5


@torch.inference_mode()
def test_smoothing_saves_a_layer_with_an_outlying_channel() -> None:
    layers = linears((64,), 64)
    x = torch.randn(32, 64)
    x[:, 3] *= 1000
    exact = layers[0](x)
    smoothed = (PackedWeight(layers, x.abs().amax(0))(x) - exact).norm() / exact.norm()
    plain_int8 = (
        PackedWeight(layers, layers[0].weight.detach().abs().amax(0))(x) - exact
    ).norm() / exact.norm()
    assert smoothed < 0.02
    assert smoothed < plain_int8 / 2


@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_a_row_is_the_same_bits_whatever_shares_the_batch(int8: bool) -> None:
    layers = linears((100,), 70)
    packed = PackedWeight(layers, torch.ones(70) if int8 else None)
    x = torch.randn(33, 70)
    together = packed(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 8, 33):
            torch.set_num_threads(1 + count % 2)
            assert torch.equal(packed(x[:count]), together[:count])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_repacking_follows_the_parameters(int8: bool) -> None:
    layers = linears((20,), 30)
    packed = PackedWeight(layers, torch.ones(30) if int8 else None)
    x = torch.randn(4, 30)
    layers[0].weight.mul_(-2)
    assert (packed(x) + layers[0](x)).norm() > 1
    packed.repack()
    torch.testing.assert_close(
        packed(x), layers[0](x), rtol=0.05 if int8 else 1e-4, atol=0.1 if int8 else 1e-5
    )


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@torch.inference_mode()
def test_what_is_not_finite_is_not_rounded_away(int8: bool, broken: float) -> None:
    layers = linears((20,), 30)
    x = torch.randn(4, 30)
    x[1, 7] = broken
    packed = PackedWeight(layers, torch.ones(30) if int8 else None)
    finite = packed(x).isfinite().all(-1)
    assert finite.tolist() == [True, False, True, True]
    layers[0].weight[5, 2] = broken
    packed.repack()
    assert packed(x[:1]).isfinite().logical_not().nonzero()[:, 1].tolist() == [5]


ROWS = st.integers(1, 4)


@settings(deadline=None, max_examples=60)
@given(
    rows=ROWS,
    vocabulary=st.sampled_from([1, 3, 16, 31, 1024, 1025, 5000]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    seed=st.integers(0, 1000),
)
def test_drawing_inverts_the_cumulative_distribution(
    rows: int, vocabulary: int, scale: float, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    if vocabulary > 3:
        logits[:, 2] = -math.inf
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
    ids, logprobs = draw(logits, [temperature] * rows, uniforms)
    for row in range(rows):
        distribution = torch.softmax(logits[row].double() / (temperature or 1.0), dim=-1)
        assert logprobs[row] == pytest.approx(math.log(distribution[ids[row]]), abs=1e-5)
        if temperature == 0:
            assert ids[row] == int(logits[row].argmax())
            continue
        cumulative = torch.cumsum(distribution, dim=-1)
        below = float(cumulative[ids[row] - 1]) if ids[row] else 0.0
        assert below - 1e-5 <= uniforms[row] <= float(cumulative[ids[row]]) + 1e-5
        assert distribution[ids[row]] > 0


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    for vocabulary in (5, 2048, 3000):
        logits = torch.full((1, vocabulary), -math.inf)
        logits[0, vocabulary // 2] = 1.0
        assert draw(logits, [1.0], [uniform]) == ([vocabulary // 2], [0.0])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 2047])
def test_broken_logits_give_a_broken_logprob(broken: float, place: int) -> None:
    logits = torch.zeros(2, 2048)
    logits[1, place] = broken
    ids, logprobs = draw(logits, [1.0, 1.0], [0.5, 0.5])
    assert math.isfinite(logprobs[0])
    assert not math.isfinite(logprobs[1])
    assert 0 <= ids[1] < 2048


def test_the_engine_draws_with_it_and_the_two_ways_agree() -> None:
    logits = torch.randn(8, 4000, generator=torch.Generator().manual_seed(0))
    uniforms = [i / 8 + 0.01 for i in range(8)]
    native = sample(logits.clone(), [1.0] * 8, [0] * 8, [1.0] * 8, uniforms)
    plain_ids, plain_logprobs = sample(logits.double(), [1.0] * 8, [0] * 8, [1.0] * 8, uniforms)
    assert native[0] == plain_ids
    assert native[1] == pytest.approx(plain_logprobs, abs=1e-5)


def fresh(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    """Forget the loaded library, and what is set is set."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(library, "_outcome", library._outcome.__wrapped__)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler 'no-such-compiler'; install g++"),
        ("false", "cannot compile the kernels"),
        ("true", "cannot compile the kernels: it says nothing"),
        ("sh -c 'kill -9 $$'", "was killed by signal 9"),
    ],
)
def test_a_compiler_that_does_not_do_is_a_reason(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh(monkeypatch, CXX=compiler, HEADRACE_CACHE=str(tmp_path))
    assert reason in str(library.unavailable_reason())
    assert not library.available()


def test_a_cache_that_cannot_be_written_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch, HEADRACE_CACHE="/proc/nope")
    assert "set HEADRACE_CACHE" in str(library.unavailable_reason())


def test_another_process_that_compiles_for_too_long_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh(monkeypatch, HEADRACE_CACHE=str(tmp_path))
    monkeypatch.setattr(library, "_COMPILE_TIMEOUT_S", 0.05)
    (tmp_path / "kernels").mkdir()
    with locked(tmp_path / "kernels" / "compiling.lock", timeout_s=0):
        assert "another process has been compiling kernels" in str(library.unavailable_reason())


def test_a_damaged_library_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading a cut one would end the process with a bus error."""
    fresh(monkeypatch, HEADRACE_CACHE=str(tmp_path), CXX="g++ -O1")
    built = library._compiled()
    whole = built.read_bytes()
    built.write_bytes(whole[: len(whole) // 2])
    assert library._compiled() == built
    assert len(built.read_bytes()) == len(whole)
    assert library.available()
