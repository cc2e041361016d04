"""Tiny models, ragged groups, and the unpacked loss written out in plain loops."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask

from headrace.algorithms import load_algorithm
from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.trainer import Trainer
from headrace.types import Trajectory, TrajectoryId

VOCABULARY = 61
TOLERANCE = 1e-9


def exact_norms(module: nn.Module) -> nn.Module:
    """Let RMS norms compute in their input's precision.

    transformers casts to float32 inside them, also in a float64 model; that rounds the sum of a packed
    prompt's gradients and the parts of an unpacked one's differently, by some 1e-7.
    """

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        weight = 1 + self.weight if type(self).__name__.startswith("Gemma") else self.weight
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = forward.__get__(norm)
    return module


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return exact_norms(LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).to(dtype).eval())


def trajectory(
    group: int,
    sample: int,
    prompt: Sequence[int],
    response: Sequence[tuple[int, bool]],
    reward: float = 0.0,
    *,
    temperature: float = 1.0,
    version: int = 0,
    logprob: float | None = None,
    seed: int = 0,
) -> Trajectory:
    rng = random.Random(f"{seed}.{group}.{sample}")
    result = Trajectory(TrajectoryId(group, sample, 0), temperature, reward=reward, finish_reason="stop")
    result.append_observed(prompt)
    for token, sampled in response:
        if sampled:
            result.append_sampled(token, -rng.uniform(2, 6) if logprob is None else logprob, version)
        else:
            result.append_observed([token])
    return result


def random_group(
    group: int,
    prompt: int,
    lengths: Sequence[int],
    *,
    turns: bool = False,
    temperature: float = 1.0,
    version: int = 0,
) -> list[Trajectory]:
    """A group of one random prompt; with `turns`, some tokens inside responses are an environment's."""
    rng = random.Random(f"{group}.{prompt}.{list(lengths)}")
    prompt_ids = [rng.randrange(VOCABULARY) for _ in range(prompt)]
    samples = []
    for sample, length in enumerate(lengths):
        response = [(rng.randrange(VOCABULARY), True)]
        response += [(rng.randrange(VOCABULARY), not turns or rng.random() < 0.6) for _ in range(length - 1)]
        samples.append(
            trajectory(
                group, sample, prompt_ids, response, rng.random(), temperature=temperature, version=version
            )
        )
    return samples


def ragged_groups() -> list[list[Trajectory]]:
    """Prompts and responses of many lengths: 1 among both, several turns, several temperatures."""
    return [
        random_group(0, 5, [3, 1, 7, 2]),
        random_group(1, 1, [1, 1, 4]),
        random_group(2, 9, [20, 2, 40, 17, 1], turns=True),
        random_group(3, 3, [1, 1], temperature=0.7),
        random_group(4, 4, [6, 5, 9], turns=True, temperature=1.3),
        random_group(5, 2, [8], temperature=1.0),
    ]


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Dense causal attention over one sequence in the inputs' own precision (transformers' uses float32).

    `indices` [1, N, K] are the keys that transformers' own indexer selected for each query.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length = query.shape[2]
    hidden = [
        [j > i or (sliding_window is not None and i - j >= sliding_window) for j in range(length)]
        for i in range(length)
    ]
    scores = scores.masked_fill(torch.tensor(hidden), -math.inf)
    if indices is not None:
        left_out = torch.ones(length, length, dtype=torch.bool).scatter(-1, indices[0].long(), False)
        scores = scores.masked_fill(left_out, -math.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(1, -1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain_for_tests", plain_attention)
AttentionMaskInterface.register("plain_for_tests", sdpa_mask)  # read by indexers only


def plain_logprobs(module: nn.Module, sample: Trajectory, implementation: str = "sdpa") -> list[Tensor]:
    """One sequence alone through the module: a scalar per sampled token."""
    module.set_attn_implementation(implementation)
    logits = module(input_ids=torch.tensor([sample.token_ids]), use_cache=False).logits[0]
    temperature = sample.temperature if sample.temperature > 0 else 1.0
    table = torch.log_softmax(logits / temperature, dim=-1)
    return [table[i - 1, sample.token_ids[i]] for i in range(len(sample.token_ids)) if sample.sampled[i]]


def plain_loss(
    module: nn.Module,
    groups: Sequence[Sequence[Trajectory]],
    config: AlgorithmConfig,
    reference: nn.Module | None = None,
    implementation: str = "sdpa",
) -> Tensor:
    """The batch's loss: each formula as it is written, one token at a time."""
    sequence_means: list[Tensor] = []
    all_tokens: list[Tensor] = []
    for group in groups:
        rewards = [sample.reward for sample in group]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
        for sample in group:
            if config.mask_truncated and sample.finish_reason != "stop":
                continue
            advantage = sample.reward - mean
            if config.normalize_std:
                advantage /= deviation + 1e-4
            if len(set(rewards)) == 1:
                advantage = 0.0
            behaviour = [lp for lp, s in zip(sample.logprobs, sample.sampled, strict=True) if s]
            references = plain_logprobs(reference, sample, implementation) if reference is not None else None
            terms = []
            for t, logp in enumerate(plain_logprobs(module, sample, implementation)):
                if config.ratio == "behaviour":
                    r, weight = (logp - behaviour[t]).exp(), 1.0
                else:
                    r = (logp - logp.detach()).exp()
                    weight = min(math.exp(logp.item() - behaviour[t]), config.importance_cap)
                clipped = r.clamp(1 - config.clip_low, 1 + config.clip_high)
                term = weight * torch.minimum(r * advantage, clipped * advantage)
                if references is not None:
                    difference = references[t].detach() - logp
                    term = term - config.kl_coef * (difference.exp() - difference - 1)
                terms.append(-term)
            all_tokens += terms
            sequence_means.append(sum(terms) / len(terms))
    values = all_tokens if config.loss_aggregation == "token" else sequence_means
    return sum(values) / len(values)


def make_trainer(
    module: nn.Module, reference: nn.Module | None = None, tokens: int = 64, **settings: Any
) -> Trainer:
    config = AlgorithmConfig(**settings)
    return Trainer(module, load_algorithm(config), TrainerConfig(micro_batch_tokens=tokens), 10, reference)


def assert_equal_gradients(
    trainer: Trainer,
    groups: Sequence[Sequence[Trajectory]],
    implementation: str = "sdpa",
    tolerance: float = TOLERANCE,
) -> None:
    """The loss and every gradient that the trainer takes of `groups` are those of `plain_loss`."""
    module = trainer.module
    result = trainer.accumulate(groups, version=0, max_staleness=0)
    packed = {
        name: p.grad / result.denominator for name, p in module.named_parameters() if p.grad is not None
    }
    module.zero_grad()
    loss = plain_loss(module, groups, trainer.algorithm.settings, trainer.reference, implementation)
    loss.backward()
    unpacked = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert packed.keys() == unpacked.keys()
    assert result.loss_sum / result.denominator == pytest.approx(loss.item(), abs=tolerance)
    assert max(gradient.abs().max().item() for gradient in unpacked.values()) > 1e-3
    for name, gradient in unpacked.items():
        assert (packed[name] - gradient).abs().max() < tolerance, name
    module.zero_grad()
