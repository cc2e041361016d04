"""DeepSeek sparse attention: an *indexer* in a layer scores all keys for each query, and the layer attends to the
best `index_topk` of them only.

transformers' indexers score one sequence at a time and keep their keys in transformers' cache. `use_indexers` lets
them hand their queries, keys and weights to headrace's attention backend instead, which knows who sees whom.

Invariants
* Under any other attention implementation an indexer does what transformers made it do.
* No gradient flows through a selection, as in transformers: an indexer's own weights are not trained.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.models.attention import ATTENTION, Selection, select

ROTATIONS = {"deepseek_v32": "apply_rotary_pos_emb", "glm_moe_dsa": "apply_rotary_pos_emb_interleave"}
"""Model types whose indexers are known, and the function by which each one rotates its queries and keys."""


def use_indexers(module: PreTrainedModel) -> None:
    """Let the indexers inside `module` select through headrace's attention backend, in place.

    Other architectures are left alone.
    """
    if module.config.get_text_config().model_type not in ROTATIONS:
        return
    for child in module.modules():
        if type(child).__name__.endswith("Indexer") and not isinstance(child, _Indexer):
            child.__class__ = _selecting(type(child))


@cache
def _selecting(indexer: type[nn.Module]) -> type[nn.Module]:
    return type(indexer.__name__, (_Indexer, indexer), {"__module__": indexer.__module__})


class _Indexer(nn.Module):
    """Stands before an architecture's own indexer class."""

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | Selection:
        """What each of the N tokens of a row attends to.

        The score of key j for query i is Σ_h w_ih · max(0, q_ih · k_j) (DeepSeek-V3.2, equation 1). transformers'
        constant factors are left out: they do not change the order.

        Args:
            hidden_states: [1, N, hidden size].
            q_resid: [1, N, rank], the latent queries of the layer's attention.
            position_embeddings: cosines and sines, [1, N, rotated width] each.
        """
        if self.config._attn_implementation != ATTENTION:
            return super().forward(hidden_states, q_resid, position_embeddings, *args, **kwargs)
        with torch.no_grad():
            rotate = getattr(sys.modules[type(self).__module__], ROTATIONS[self.config.model_type])
            query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
            key = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
            rotated = self.qk_rope_head_dim
            turned = rotate(query[..., :rotated], key[..., :rotated], *position_embeddings, unsqueeze_dim=2)
            query = torch.cat([turned[0], query[..., rotated:]], dim=-1)
            key = torch.cat([turned[1], key[..., rotated:]], dim=-1)
            # Some checkpoints keep this projection in float32.
            weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
            return select(
                self.layer_idx,
                query[0].transpose(0, 1),
                key[0].transpose(0, 1),
                weights[0].transpose(0, 1).unsqueeze(-1),
                self.index_topk,
            )
