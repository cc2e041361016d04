"""The forward of Llama-shaped models over KV slots, as one call.

Invariants
* A token's logits depend on its sequence, its position, the keys and values before it and the weights alone, in
  every bit: not on what shares the batch, on chunks of the prefill, nor on the number of threads.
* All keys and values of a step are written before anything looks at them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.library import address, library
from headrace.kernels.linear import LinearStruct, PackedWeight

_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Cluster(NamedTuple):
    """Rows `first … first + count - 1` of a batch, whose sequences agree in their first `shared` tokens.

    They read those tokens' keys and values from the first one's slot, so that memory gives them once.
    """

    first: int
    count: int
    shared: int


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One decoder layer; norms are [hidden] or [dim], keys and values [slots, kv_heads, rows, dim]."""

    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None
    scaling: float


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_slot_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_slot_stride", "value_head_stride")),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("layers", "hidden", "heads", "kv_heads", "dim", "intermediate")
        ),
        ("epsilon", ctypes.c_float),
        ("half_kv", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "layer")),
        ("head", LinearStruct),
    ]


class _Cluster(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int32), ("count", ctypes.c_int32), ("shared", ctypes.c_int64)]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "clusters", "outputs")),
        *((name, ctypes.c_void_p) for name in ("tokens", "slots", "positions", "cluster")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "output_rows", "logits", "scratch")),
        ("threads", ctypes.c_int32),
    ]


class LlamaKernel:
    """A model's packed weights and the sizes that the forward needs.

    Args:
        embedding: [vocabulary, hidden], read in place; norm: [hidden], read in place.
        epsilon: of every norm.
    """

    def __init__(
        self,
        layers: Sequence[LlamaLayer],
        head: PackedWeight,
        embedding: Tensor,
        norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        epsilon: float,
    ) -> None:
        self.layers, self.head = list(layers), head
        self.embedding, self.norm = embedding, norm
        self.heads, self.kv_heads, self.dim, self.epsilon = heads, kv_heads, dim, epsilon
        self._model: _Model | None = None
        self._bound: tuple[list[Tensor], list[Tensor]] | None = None
        self.scratch = torch.empty(0)
        """Memory that a call works in, grown when it is needed. A kernel that takes another's place may take it too."""

    @property
    def weights(self) -> list[PackedWeight]:
        """Every packed weight, in the order of the layers; the head is the last."""
        return [w for layer in self.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [
            self.head
        ]

    def repack(self) -> None:
        """Take the parameters as they are now."""
        for weight in self.weights:
            weight.repack()
        self._model = None

    def __call__(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        clusters: Sequence[Cluster],
        cosine: Tensor,
        sine: Tensor,
        outputs: Sequence[int],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Compute N tokens into the slots.

        Args:
            tokens, slots, positions: N each: a token, the slot of its sequence, its position there. Tokens of
                one sequence stand in ascending order of position.
            clusters: cover all rows in order.
            cosine, sine: [N, dim], float32.
            outputs: R rows whose logits are wanted.
            keys, values: per layer [slots, kv_heads, rows, dim], float32 or bfloat16, rows of `dim` together.

        Returns:
            [R, vocabulary], float32.
        """
        model = self._bind(keys, values)
        rows, count = len(tokens), len(outputs)
        logits = torch.empty(count, self.head.outputs)
        needed = library().headrace_scratch(ctypes.byref(model), ctypes.c_int64(rows), ctypes.c_int64(count))
        if len(self.scratch) < needed:
            self.scratch = torch.empty(needed)
        cluster_array = (_Cluster * len(clusters))(*(_Cluster(*cluster) for cluster in clusters))
        arrays = (
            (ctypes.c_int64 * rows)(*tokens),
            (ctypes.c_int32 * rows)(*slots),
            (ctypes.c_int32 * rows)(*positions),
            cluster_array,
        )
        output_rows = (ctypes.c_int32 * count)(*outputs)
        batch = _Batch(
            rows,
            len(clusters),
            count,
            *(ctypes.addressof(array) for array in arrays),
            address(cosine),
            address(sine),
            ctypes.addressof(output_rows),
            address(logits),
            address(self.scratch),
            torch.get_num_threads(),
        )
        library().headrace_forward(ctypes.byref(model), ctypes.byref(batch))
        return logits

    def _bind(self, keys: list[Tensor], values: list[Tensor]) -> _Model:
        """The model's structure, with where the KV lies."""
        if self._model is not None and self._bound is not None and self._bound[0] is keys:
            return self._model
        self._array = (_Layer * len(self.layers))(
            *(self._layer(*entry) for entry in zip(self.layers, keys, values, strict=True))
        )
        self._bound = (keys, values)
        self._model = _Model(
            len(self.layers),
            self.embedding.shape[1],
            self.heads,
            self.kv_heads,
            self.dim,
            self.layers[0].down.inputs,
            self.epsilon,
            _KV_TYPES[keys[0].dtype],
            address(self.embedding.detach()),
            address(self.norm.detach()),
            ctypes.addressof(self._array),
            self.head.struct(),
        )
        return self._model

    def _layer(self, layer: LlamaLayer, keys: Tensor, values: Tensor) -> _Layer:
        assert keys.stride(2) == values.stride(2) == self.dim
        assert keys.stride(3) == values.stride(3) == 1
        norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        return _Layer(
            *(weight.struct() for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)),
            *(address(None if norm is None else norm.detach()) for norm in norms),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            layer.window or 0,
            layer.scaling,
        )
