"""What the machine can do at best: a worker of `benchmarks/limits.py`.

Settings: `threads`. A request: `measure`, one of "gemm_float32", "gemm_int8", "bandwidth". Its answer: for each way of
doing it, the rate of every window, in operations or bytes per second.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace import kernels

SHAPES = ((256, 576, 3072), (512, 576, 3072), (512, 1536, 576), (1024, 1024, 1024), (2048, 2048, 2048))
"""M, K, N of products [M, K] x [K, N]: two of SmolLM2's own, and squares that fit the caches better."""

BUFFER_BYTES = 1 << 30
"""Far more than any cache holds."""

WINDOWS = 5
WINDOW_S = 0.2


def rates(work: float, operation: Callable[[], object]) -> list[float]:
    """`work` per second in each of WINDOWS windows of at least WINDOW_S, after a warm-up of one."""
    result = []
    for _ in range(WINDOWS + 1):
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < WINDOW_S:
            operation()
            count += 1
        result.append(work * count / (time.perf_counter() - started))
    return result[1:]


def gemm_float32() -> dict[str, list[float]]:
    """Float operations per second: torch's own product, oneDNN over prepacked weights, headrace's kernels."""
    found = {}
    for m, k, n in SHAPES:
        x, layer = torch.randn(m, k), nn.Linear(k, n, bias=False)
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        ways: dict[str, Callable[[], object]] = {
            "torch.mm": partial(torch.mm, x, layer.weight.t()),
            "oneDNN prepacked": partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], ""),
        }
        if kernels.available():
            ways["headrace's kernel"] = partial(kernels.PackedWeight([layer]), x)
        for name, way in ways.items():
            found[f"{name} {m}x{k}x{n}"] = rates(2 * m * k * n, way)
    return found


def gemm_int8() -> dict[str, list[float]]:
    """Integer operations per second of int8 products that are summed in int32.

    headrace's kernel also rounds its input and scales its output, which is in its time.
    """
    found = {}
    for m, k, n in SHAPES:
        x = torch.randint(-127, 128, (m, k), dtype=torch.int8)
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        ways: dict[str, Callable[[], object]] = {
            "torch._int_mm, weight [N, K]": partial(torch._int_mm, x, weight.t()),
            "torch._int_mm, weight [K, N]": partial(torch._int_mm, x, weight.t().contiguous()),
        }
        if kernels.available():
            layer = nn.Linear(k, n, bias=False)
            ways["headrace's kernel"] = partial(
                kernels.PackedWeight([layer], torch.ones(k)), torch.randn(m, k)
            )
        for name, way in ways.items():
            found[f"{name} {m}x{k}x{n}"] = rates(2 * m * k * n, way)
    return found


def bandwidth() -> dict[str, list[float]]:
    """Bytes read per second: a sum, and a matrix times a vector."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    matrix: Tensor = buffer.view(-1, 1024)
    vector = torch.ones(1024)
    return {
        "sum": rates(BUFFER_BYTES, buffer.sum),
        "matrix times vector": rates(BUFFER_BYTES, partial(torch.mv, matrix, vector)),
    }


MEASURES = {"gemm_float32": gemm_float32, "gemm_int8": gemm_int8, "bandwidth": bandwidth}


def main() -> None:
    torch.set_num_threads(serving.settings()["threads"])

    @torch.inference_mode()
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return MEASURES[request["measure"]]()

    serving.serve({}, answer)


if __name__ == "__main__":
    main()
