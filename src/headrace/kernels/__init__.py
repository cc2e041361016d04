"""Native CPU kernels: what a step of generation spends its time in, in C++ that is compiled where it runs."""

from headrace.kernels.library import available, kernel_fingerprint, suits, unavailable_reason
from headrace.kernels.linear import Linear, PackedWeight, input_smoothing
from headrace.kernels.llama import Cluster, LlamaKernel, LlamaLayer
from headrace.kernels.memory import HugePages
from headrace.kernels.sampler import draw
from headrace.kernels.training import (
    PackedLayout,
    log_sum_exp,
    packed_attention,
    rms_norm,
    scaled_softmax,
    swiglu,
    weight_gradient,
)

__all__ = [
    "Cluster",
    "HugePages",
    "Linear",
    "LlamaKernel",
    "LlamaLayer",
    "PackedLayout",
    "PackedWeight",
    "available",
    "draw",
    "input_smoothing",
    "kernel_fingerprint",
    "log_sum_exp",
    "packed_attention",
    "rms_norm",
    "scaled_softmax",
    "suits",
    "swiglu",
    "unavailable_reason",
    "weight_gradient",
]
