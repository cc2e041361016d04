"""Groups in, packed rows out: a prompt once, then the responses to it, several groups to a row.

Invariants
* The partition is a function of the trajectories' sizes, the prompts' equality and the order alone.
* Every sampled token of every trajectory appears exactly once over the micro-batches, all tokens of one
  trajectory in the same one.
* Only what predicts something is computed: a response ends before its last sampled token, and logits exist
  only at positions that predict a sampled token. The first tokens of all responses to a prompt share one such
  row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.trainer.attention import PackedAttention, Segment
from headrace.types import Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of N tokens that predicts T sampled tokens from R rows of logits.

    Attributes:
        input_ids, position_ids: [1, N]; positions go on from the prompt's length in each response.
        logit_positions: [R], ascending indices into the row.
        temperatures: [R], float64, what each row's logits are divided by.
        rows: [T], which of the R rows predicts each token.
        targets: [T], the sampled ids.
        logp_behaviour: [T], float64, the generator's log-probs.
        versions: [T], the policy versions that sampled them.
        owners: [T], indices into `trajectories`.
        trajectories: those packed here.
        members: their indices in the flattened input of `pack`.

    What enters the model is on its device; what is only accounted for (float64, versions, owners) is on the
    CPU.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: PackedAttention
    logit_positions: Tensor
    temperatures: Tensor
    rows: Tensor
    targets: Tensor
    logp_behaviour: Tensor
    versions: Tensor
    owners: Tensor
    trajectories: tuple[Trajectory, ...]
    members: tuple[int, ...]


@dataclass(slots=True)
class _Chunk:
    """Samples that share a prompt and stand together in one row."""

    prompt: int
    members: list[int] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


def pack(
    groups: Sequence[Sequence[Trajectory]], micro_batch_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Pack groups into rows of at most `micro_batch_tokens` tokens.

    A group that is larger is split between its samples, each part with its own copy of the prompt; a single
    sample that is larger has a row to itself. Samples of a group whose prompts or temperatures differ are
    packed as if they were groups of their own. Trajectories without a sampled token are left out.

    Raises:
        ValueError: a trajectory starts with a sampled token, which nothing predicts.
    """
    flat = [trajectory for group in groups for trajectory in group]
    rows: list[list[_Chunk]] = []
    free: list[int] = []
    for chunk in _chunks(groups, micro_batch_tokens):
        # First fit, in order.
        row = next((i for i, tokens in enumerate(free) if chunk.tokens <= tokens), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(micro_batch_tokens)
        rows[row].append(chunk)
        free[row] -= chunk.tokens
    return [_build(row, flat, device) for row in rows]


def _chunks(groups: Sequence[Sequence[Trajectory]], limit: int) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    index = 0
    for group in groups:
        open_chunks: dict[tuple[tuple[int, ...], float], _Chunk] = {}
        for trajectory in group:
            prompt = trajectory.prompt_length
            if prompt < len(trajectory.token_ids):
                if prompt == 0:
                    raise ValueError(
                        f"trajectory {trajectory.id} starts with a sampled token, which nothing predicts"
                    )
                response = _response_inputs(trajectory)
                key = (tuple(trajectory.token_ids[:prompt]), trajectory.temperature)
                chunk = open_chunks.get(key)
                if chunk is None or chunk.tokens + response > limit:
                    chunk = open_chunks[key] = _Chunk(prompt)
                    chunks.append(chunk)
                chunk.members.append(index)
                chunk.responses.append(response)
            index += 1
    return chunks


def _response_inputs(trajectory: Trajectory) -> int:
    """Tokens after the prompt that predict something: those before the last sampled one."""
    last = len(trajectory.sampled) - 1
    while not trajectory.sampled[last]:
        last -= 1
    return last - trajectory.prompt_length


def _build(row: Sequence[_Chunk], flat: Sequence[Trajectory], device: torch.device | str) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    logit_positions: list[int] = []
    temperatures: list[float] = []
    rows: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    versions: list[int] = []
    owners: list[int] = []
    members: list[int] = []
    for chunk in row:
        first = flat[chunk.members[0]]
        temperature = first.temperature or 1.0
        ids.extend(first.token_ids[: chunk.prompt])
        positions.extend(range(chunk.prompt))
        prompt_row = len(logit_positions)
        logit_positions.append(len(ids) - 1)
        temperatures.append(temperature)
        for member, response in zip(chunk.members, chunk.responses, strict=True):
            trajectory = flat[member]
            offset = len(ids)
            end = chunk.prompt + response
            ids.extend(trajectory.token_ids[chunk.prompt : end])
            positions.extend(range(chunk.prompt, end))
            for index in range(chunk.prompt, end + 1):
                if not trajectory.sampled[index]:
                    continue
                if index == chunk.prompt:
                    rows.append(prompt_row)
                else:
                    rows.append(len(logit_positions))
                    logit_positions.append(offset + index - 1 - chunk.prompt)
                    temperatures.append(temperature)
                targets.append(trajectory.token_ids[index])
                behaviour.append(trajectory.logprobs[index])
                versions.append(trajectory.versions[index])
                owners.append(len(members))
            members.append(member)
    segments = [Segment(chunk.prompt, tuple(chunk.responses)) for chunk in row]
    return MicroBatch(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        attention=PackedAttention(segments, device),
        logit_positions=torch.tensor(logit_positions, device=device),
        temperatures=torch.tensor(temperatures, dtype=torch.float64),
        rows=torch.tensor(rows, device=device),
        targets=torch.tensor(targets, device=device),
        logp_behaviour=torch.tensor(behaviour, dtype=torch.float64),
        versions=torch.tensor(versions),
        owners=torch.tensor(owners),
        trajectories=tuple(flat[member] for member in members),
        members=tuple(members),
    )
