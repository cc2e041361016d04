"""The model's forward as the engine calls it: a row of tokens in, logits of some of them out.

Two implementations: `ModuleForward` runs the Hugging Face module itself and is right for every architecture that
headrace loads; `LlamaForward` computes the Llama shape (Llama, SmolLM, Mistral, Qwen 2 and 3) with few, large
operations.

Invariant: both give the module's own logits to within rounding, for the parameters at the last `repack`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.attention import LayerProbe
from headrace.models.attention import AttentionBackend, AttentionOptions, attention_backend
from headrace.models.linear import suits_onednn
from headrace.models.packing import inference_replica, repack

LLAMA_SHAPED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose layers `LlamaForward` computes."""


class Forward(Protocol):
    """A forward over one row of N tokens that attends through `backend`."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """token_ids, positions [N], rows [R] (indices into the row) -> logits [R, V]."""

    def repack(self) -> None:
        """Bring copies of weights up to date with the module's parameters."""


def make_forward(module: nn.Module, prepack: bool) -> Forward:
    """The fastest forward for `module` on its device; without `prepack`, the module as it is."""
    fits = type(module).__name__ in LLAMA_SHAPED and module.config.hidden_act == "silu"
    if prepack and fits and suits_onednn(module):
        return LlamaForward(module)
    return ModuleForward(module, prepack)


class ModuleForward:
    """The Hugging Face module, over the same parameters, its linear layers prepacked where that is faster."""

    def __init__(self, module: nn.Module, prepack: bool) -> None:
        self.module = inference_replica(module, prepack)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, backend: AttentionBackend
    ) -> Tensor:
        with attention_backend(backend):
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
            )
        return output.logits[0]

    def repack(self) -> None:
        repack(self.module)


class LlamaForward:
    """Llama-shaped layers with merged and prepacked projections. float32 on the CPU."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        # The module itself says how its layers attend: where architectures keep their windows differs.
        probe = LayerProbe()
        one = torch.zeros(1, dtype=torch.long)
        with torch.no_grad():
            ModuleForward(module, prepack=False)(one, one, one, probe)
        self._options = probe.options
        self.repack()

    @torch.no_grad()
    def repack(self) -> None:
        self.layers = [_Layer(layer, self._options[i]) for i, layer in enumerate(self.module.model.layers)]
        self.head = _Packed([self.module.lm_head])

    def __call__(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, backend: AttentionBackend
    ) -> Tensor:
        model = self.module.model
        hidden = F.embedding(token_ids, model.embed_tokens.weight)
        cos, sin = model.rotary_emb(hidden, position_ids=positions.unsqueeze(0))
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1).clone()
        # rotate_half(x)·sin = roll(x)·sin with the first half's sign turned.
        sin[..., : sin.shape[-1] // 2].neg_()
        for index, layer in enumerate(self.layers):
            hidden = layer(index, hidden, cos, sin, backend)
        return self.head(_norm(hidden.index_select(0, rows), model.norm))


class _Layer:
    """One decoder layer over N tokens."""

    def __init__(self, layer: Any, options: AttentionOptions) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Packed([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _Packed([attention.o_proj])
        self.gate_up = _Packed([mlp.gate_proj, mlp.up_proj])
        self.down = _Packed([mlp.down_proj])
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.dim = attention.head_dim
        self.heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.options = options

    def __call__(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend
    ) -> Tensor:
        states = self.qkv(_norm(hidden, self.input_norm)).view(len(hidden), -1, self.dim)
        rotated, value = states.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split((self.heads, self.kv_heads), dim=1)
            rotated = torch.cat([_norm(query, self.query_norm), _norm(key, self.key_norm)], dim=1)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.dim // 2, dims=-1), sin)
        query, key = rotated.split((self.heads, self.kv_heads), dim=1)
        attended = backend.attend(
            index, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.options
        )
        hidden = self.out(attended.transpose(0, 1).flatten(1), add=hidden)
        gate, up = self.gate_up(_norm(hidden, self.mlp_norm)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), add=hidden)


class _Packed:
    """Linear layers over one input, as a single prepacked one."""

    def __init__(self, linears: list[Any]) -> None:
        weight = linears[0].weight if len(linears) == 1 else torch.cat([linear.weight for linear in linears])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = None
        if linears[0].bias is not None:
            self.bias = torch.cat([linear.bias for linear in linears]).detach()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x [N, in] -> [N, out], plus `add` [N, out]."""
        if add is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise(x, add, self.weight, self.bias, "add")


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
