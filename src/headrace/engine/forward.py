"""The model's forward as the engine calls it: a batch of tokens in, logits of some of them out.

Two implementations: `ModuleForward` runs the Hugging Face module itself and is right for every architecture that
headrace loads; `LlamaForward` computes the Llama shape (Llama, SmolLM, Mistral, Qwen 2 and 3) in headrace's own
kernels.

Invariants
* Both give the module's own logits for the parameters at the last `repack` or `switch`, to within the rounding of the
  weight format.
* `prepare` and `show` change nothing that a call reads; they may run in another thread, one at a time. At most two
  packed sets of weights exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace import kernels
from headrace.engine.attention import LayerProbe, SlotAttention
from headrace.engine.batch import Batch
from headrace.engine.slots import KVSlots, LayerShape
from headrace.errors import UserError
from headrace.kernels import Cluster, HugePages, Linear, LlamaKernel, LlamaLayer, PackedWeight
from headrace.models.attention import attention_backend
from headrace.models.calibration import input_peaks
from headrace.models.linear import suits_onednn
from headrace.models.packing import assign, inference_replica, pack_beside, repack, use_packed

LLAMA_SHAPED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose layers `LlamaForward` computes."""

CLUSTER_ROWS = 8
"""Tokens that go over keys and values together; more would leave too few clusters for all threads."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights that are packed and not yet used: all tensors of the module by name, and their packed form."""

    tensors: Mapping[str, Tensor]
    packed: Any


class Forward(Protocol):
    """A forward over N tokens that reads and writes KV slots.

    Attributes:
        shapes: each layer's keys and values.
        kv_dtype: what they are kept in.
    """

    shapes: list[LayerShape]
    kv_dtype: torch.dtype

    def __call__(self, batch: Batch, slots: KVSlots) -> Tensor:
        """Compute the batch into the slots. Returns logits [R, V] of its `outputs`."""

    def repack(self) -> None:
        """Bring copies of weights up to date with the module's parameters."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> Prepared:
        """Pack other weights beside the current ones.

        Args:
            tensors: by name as in the module's state dict. They are read in place from the switch on.
        """

    def switch(self, prepared: Prepared) -> None:
        """Use prepared weights from the next call on."""

    def show(self, prepared: Prepared) -> None:
        """After `switch`: let the module's parameters show these weights too, where the forward does not read them."""


def make_forward(
    module: Any, *, prepack: bool = True, int8: bool = False, context_length: int = 2048
) -> Forward:
    """The fastest forward for `module` on its device; without `prepack`, the module as it is.

    Args:
        int8: quantise linear layers.
        context_length: the most tokens of one sequence.

    Raises:
        UserError: int8 is asked for and cannot be had here.
    """
    packable = prepack and suits_onednn(module)
    if int8:
        if not packable:
            raise UserError(
                'engine.weight_format = "int8" needs a float32 model on the CPU, and engine.prepack'
            )
        if reason := kernels.unavailable_reason():
            raise UserError(f'engine.weight_format = "int8" needs native kernels: {reason}')
    peaks = input_peaks(module, context_length) if int8 else None
    if packable and kernels.available() and _llama_shaped(module):
        probe = _probe(module)
        if _vector_heads(probe):
            return LlamaForward(module, probe, context_length, peaks)
    return ModuleForward(module, prepack, peaks)


class ModuleForward:
    """The Hugging Face module, over the same parameters, its linear layers prepacked where that is faster.

    Args:
        peaks: as `models.packing.inference_replica` takes them.
    """

    def __init__(self, module: nn.Module, prepack: bool, peaks: Mapping[str, Tensor] | None = None) -> None:
        self.module = inference_replica(module, prepack, peaks)
        self.shapes = _probe(module).ordered_shapes
        parameter = next(module.parameters())
        self.kv_dtype, self._device = parameter.dtype, parameter.device
        # The replica's parameters are the module's: what one shows, the other shows.
        self._targets = module.state_dict(keep_vars=True)
        self._spare: object = None

    def __call__(self, batch: Batch, slots: KVSlots) -> Tensor:
        count = len(batch.decode_slots)
        backend = SlotAttention(slots, batch.decode_slots, batch.positions[:count], batch.chunks)
        with attention_backend(backend):
            output = self.module(
                input_ids=torch.tensor([batch.token_ids], device=self._device),
                position_ids=torch.tensor([batch.positions], device=self._device),
                use_cache=False,
                # One row at least: an index that is empty would be taken for "all".
                logits_to_keep=torch.tensor(batch.outputs or [0], device=self._device),
            )
        return output.logits[0, : len(batch.outputs)]

    def repack(self) -> None:
        repack(self.module)

    def prepare(self, tensors: Mapping[str, Tensor]) -> Prepared:
        self._spare = None  # here, since giving back much memory takes time
        tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        return Prepared(tensors, pack_beside(self.module, tensors))

    def switch(self, prepared: Prepared) -> None:
        assign(self._targets, prepared.tensors)
        self._spare = use_packed(self.module, prepared.packed)

    def show(self, prepared: Prepared) -> None:
        """Nothing is left to do: it computes with the module's parameters."""


class LlamaForward:
    """Llama-shaped layers in native kernels, with merged and packed projections. float32 on the CPU.

    Every token's logits are the same bits whatever shares its batch.

    Args:
        probe: what its layers' attention looks like.
        peaks: by name of a linear layer; given, linear layers are int8 and keys and values bfloat16.
    """

    def __init__(
        self, module: Any, probe: LayerProbe, context_length: int, peaks: Mapping[str, Tensor] | None = None
    ) -> None:
        self.shapes = probe.ordered_shapes
        self.kv_dtype = torch.float32 if peaks is None else torch.bfloat16
        self._options = [probe.options[layer] for layer in range(len(module.model.layers))]
        self._peaks = peaks
        self._targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        model = module.model
        self._epsilon: float = model.norm.variance_epsilon
        self._kernel = self._pack(self._targets, None)
        self._spare: LlamaKernel | None = None
        # Models whose rotation depends on the length of the text are capped where it would begin to.
        positions = torch.arange(context_length).unsqueeze(0)
        with torch.no_grad():
            cosine, sine = model.rotary_emb(torch.zeros(1), position_ids=positions)
        self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()

    def __call__(self, batch: Batch, slots: KVSlots) -> Tensor:
        # Sequences with one prompt stand side by side, and their clusters read it once.
        count = len(batch.decode_slots)
        order = sorted(range(count), key=lambda row: id(batch.prompts[row]))
        place = {row: new for new, row in enumerate(order)}
        order.extend(range(count, len(batch.token_ids)))
        all_slots = batch.slots
        positions = [batch.positions[row] for row in order]
        index = torch.tensor(positions)
        return self._kernel(
            [batch.token_ids[row] for row in order],
            [all_slots[row] for row in order],
            positions,
            [*_decode_clusters([batch.prompts[row] for row in order[:count]]), *_chunk_clusters(batch)],
            self._cosine.index_select(0, index),
            self._sine.index_select(0, index),
            [place.get(row, row) for row in batch.outputs],
            slots.keys,
            slots.values,
        )

    def repack(self) -> None:
        self._kernel.repack()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Prepared:
        spare, self._spare = self._spare, None
        return Prepared(tensors, self._pack(tensors, spare))

    def switch(self, prepared: Prepared) -> None:
        prepared.packed.scratch = self._kernel.scratch
        self._spare, self._kernel = self._kernel, prepared.packed

    def show(self, prepared: Prepared) -> None:
        assign(self._targets, prepared.tensors)

    def _pack(self, tensors: Mapping[str, Tensor], spare: LlamaKernel | None) -> LlamaKernel:
        """The kernel over these weights, packed into the memory of `spare` where there is one."""
        memory = HugePages()
        reused = iter(spare.weights if spare else ())

        def packed(*names: str) -> PackedWeight:
            linears = [Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names]
            weight = next(reused, None)
            if weight is None:
                return PackedWeight(linears, None if self._peaks is None else self._peaks[names[0]], memory)
            weight.linears = linears
            weight.repack()
            return weight

        layers = []
        for index, options in enumerate(self._options):
            layer = f"model.layers.{index}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            layers.append(
                # Their order is that of `LlamaKernel.weights`. The module itself says how its layers attend: where
                # architectures keep their windows differs.
                LlamaLayer(
                    qkv=packed(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                    out=packed(f"{attention}.o_proj"),
                    gate_up=packed(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    down=packed(f"{mlp}.down_proj"),
                    input_norm=tensors[f"{layer}.input_layernorm.weight"],
                    mlp_norm=tensors[f"{layer}.post_attention_layernorm.weight"],
                    query_norm=tensors.get(f"{attention}.q_norm.weight"),
                    key_norm=tensors.get(f"{attention}.k_norm.weight"),
                    window=options.sliding_window,
                    scaling=options.scaling,
                )
            )
        shape = self.shapes[0]
        return LlamaKernel(
            layers,
            packed("lm_head"),
            tensors["model.embed_tokens.weight"],
            tensors["model.norm.weight"],
            heads=len(tensors["model.layers.0.self_attn.q_proj.weight"]) // shape.key_dim,
            kv_heads=shape.heads,
            dim=shape.key_dim,
            epsilon=self._epsilon,
        )


def _decode_clusters(prompts: Sequence[tuple[int, ...] | None]) -> list[Cluster]:
    """Neighbours with one prompt go together."""
    clusters: list[Cluster] = []
    start = 0
    for row in range(1, len(prompts) + 1):
        prompt = prompts[start]
        alike = row < len(prompts) and prompt is not None and prompts[row] is prompt
        if not alike or row - start == CLUSTER_ROWS:
            clusters.append(Cluster(start, row - start, len(prompt) if prompt else 0))
            start = row
    return clusters


def _chunk_clusters(batch: Batch) -> list[Cluster]:
    """The tokens of a chunk look at one slot, so all they see is shared."""
    return [
        Cluster(chunk.row + first, min(CLUSTER_ROWS, chunk.stop - chunk.start - first), chunk.stop)
        for chunk in batch.chunks
        for first in range(0, chunk.stop - chunk.start, CLUSTER_ROWS)
    ]


def _llama_shaped(module: Any) -> bool:
    return type(module).__name__ in LLAMA_SHAPED and module.config.hidden_act == "silu"


def _vector_heads(probe: LayerProbe) -> bool:
    """Whether all layers are alike and kernels can read whole vectors of a head, of the widest kind that there is."""
    shapes = set(probe.shapes.values())
    return len(shapes) == 1 and next(iter(shapes)).key_dim % 16 == 0


@torch.inference_mode()
def _probe(module: nn.Module) -> LayerProbe:
    """What each layer's attention looks like, from a forward of one token."""
    probe = LayerProbe()
    one = torch.zeros(1, 1, dtype=torch.long, device=next(module.parameters()).device)
    with attention_backend(probe):
        module(input_ids=one, position_ids=one, use_cache=False)
    return probe
