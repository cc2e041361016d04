"""The partition into micro-batches: complete, within its limit, deterministic."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import VOCABULARY, ragged_groups, random_group, trajectory

from headrace.trainer import pack
from headrace.types import Trajectory

GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=6), st.booleans()),
    min_size=1,
    max_size=6,
).map(lambda sizes: [random_group(i, p, lengths, turns=turns) for i, (p, lengths, turns) in enumerate(sizes)])


def cost(group: list[Trajectory]) -> int:
    return group[0].prompt_length + sum(
        max(i for i, s in enumerate(t.sampled) if s) - t.prompt_length for t in group
    )


@given(GROUPS, st.integers(1, 80))
def test_every_sampled_token_appears_once_with_what_it_needs(
    groups: list[list[Trajectory]], limit: int
) -> None:
    flat = [t for group in groups for t in group]
    found: dict[int, list[tuple[int, float, int]]] = {}
    for batch in pack(groups, limit):
        for t in range(len(batch.targets)):
            owner = batch.owners[t].item()
            member = batch.members[owner]
            assert batch.trajectories[owner] is flat[member]
            token = (batch.targets[t].item(), batch.logp_behaviour[t].item(), batch.versions[t].item())
            found.setdefault(member, []).append(token)
            # The row that predicts a token stands at the token before it, at its own position.
            at = batch.logit_positions[batch.rows[t]].item()
            index = [i for i, s in enumerate(flat[member].sampled) if s][len(found[member]) - 1]
            assert batch.input_ids[0, at] == flat[member].token_ids[index - 1]
            assert batch.position_ids[0, at] == index - 1
    assert found == {
        i: [
            x
            for x, s in zip(zip(t.token_ids, t.logprobs, t.versions, strict=True), t.sampled, strict=True)
            if s
        ]
        for i, t in enumerate(flat)
    }


@given(GROUPS, st.integers(1, 80))
def test_rows_keep_the_limit_and_groups_stay_whole_if_they_can(
    groups: list[list[Trajectory]], limit: int
) -> None:
    batches = pack(groups, limit)
    for batch in batches:
        assert batch.attention.num_tokens == batch.input_ids.shape[1]
        assert batch.input_ids.shape[1] <= limit or len(batch.members) == 1
    first = 0
    for group in groups:
        members = set(range(first, first + len(group)))
        if cost(group) <= limit:
            assert sum(bool(members & set(batch.members)) for batch in batches) == 1
        first += len(group)


@given(GROUPS, st.integers(1, 80))
def test_the_partition_depends_on_sizes_only(groups: list[list[Trajectory]], limit: int) -> None:
    members = [batch.members for batch in pack(groups, limit)]
    other = [
        [
            dataclasses.replace(t, token_ids=[(x * 7 + 3) % VOCABULARY for x in t.token_ids], reward=0.0)
            for t in group
        ]
        for group in groups
    ]
    assert [batch.members for batch in pack(other, limit)] == members


def test_a_prompt_is_computed_once_and_its_last_row_is_shared() -> None:
    (batch,) = pack([random_group(0, 10, [4, 4, 4])], 1000)
    assert batch.input_ids.shape[1] == 10 + 3 * 3
    assert len(batch.logit_positions) == 1 + 3 * 3
    assert (batch.rows == 0).sum() == 3
    assert batch.logit_positions.tolist() == sorted(batch.logit_positions.tolist())


def test_samples_of_one_token_need_only_the_prompt() -> None:
    (batch,) = pack([random_group(0, 3, [1, 1, 1])], 1000)
    assert batch.input_ids.shape[1] == 3
    assert batch.logit_positions.tolist() == [2]


def test_what_follows_the_last_sampled_token_is_left_out() -> None:
    sample = trajectory(0, 0, [1, 2], [(3, True), (4, False), (5, True), (6, False), (7, False)])
    (batch,) = pack([[sample]], 1000)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4]]
    assert batch.targets.tolist() == [3, 5]
    assert batch.logit_positions.tolist() == [1, 3]


def test_several_groups_share_a_row() -> None:
    batches = pack(ragged_groups(), 100_000)
    assert len(batches) == 1
    assert batches[0].members == tuple(range(18))


def test_greedy_samples_are_scored_at_temperature_one() -> None:
    (batch,) = pack([random_group(0, 2, [2], temperature=0.0)], 100)
    assert torch.equal(batch.temperatures, torch.ones(2, dtype=torch.float64))


def test_a_sampled_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3\.0\.0"):
        pack([[trajectory(3, 0, [], [(1, True)])]], 100)
