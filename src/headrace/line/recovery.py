"""What a line did, read from its journal: how it goes on after a crash, and how its weights come about once more.

Invariants
* A live line and a journal lead to the same state: both go through `Episodes`, `Admission`, `Ledger` and `Trainer`.
* Gradients and steps are taken again in the recorded order and partition, with the recorded number of threads, so
  that on the same machine the weights are the same bits; their digest says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from headrace.config import Config, SamplingConfig
from headrace.engine import TokenEvent
from headrace.environments import WorldReply
from headrace.errors import RunError, UserError
from headrace.schedule import Bucket
from headrace.state.journal import Event
from headrace.types import Group, TrajectoryId

if TYPE_CHECKING:
    from headrace.line.production import Production


KEPT_SETTINGS = {
    "model": ("dtype",),
    "environment": ("max_attempts", "max_turns", "max_episode_tokens"),
    "sampling": tuple(SamplingConfig.model_fields),
    "algorithm": ("group_size",),
    "engine": ("context_length", "weight_format"),
    "line": ("groups_per_step", "max_staleness", "seed"),
}
"""Settings that a run keeps to its end: they say what a trajectory is, and unfinished ones are carried over."""


class Recovery:
    """Feeds a journal's events to a line that does nothing by itself meanwhile.

    Attributes:
        steps: per replayed step (step, digest recorded, digest now).
        tokens: sampled tokens that came from the journal.
    """

    def __init__(self, line: Production) -> None:
        self.line = line
        self.steps: list[tuple[int, str, str]] = []
        self.tokens = 0

    def apply(self, events: Iterable[Event]) -> None:
        """Bring the line to the state after these events.

        Raises:
            RunError: the events do not belong to this line.
        """
        line = self.line
        threads = torch.get_num_threads()
        line.episodes.passive = True
        try:
            for event in events:
                handler = getattr(self, f"_{event.kind}", None)
                if handler is not None:
                    try:
                        handler(event.body)
                    except (KeyError, ValueError, IndexError, AssertionError, AttributeError) as error:
                        raise RunError(
                            f"event {event.seq} ({event.kind}) of the journal does not follow from those before it: "
                            f"{error!r}"
                        ) from error
        finally:
            torch.set_num_threads(threads)

    def log(self, step: int, groups: list[Group], metrics: dict[str, Any]) -> None:
        """Write a step into the logs again, which end at the checkpoint."""
        self.line.log_step(step, groups, metrics)

    def _start(self, body: dict[str, Any]) -> None:
        refuse_changed(body["config"], self.line.config)

    def _admit(self, body: dict[str, Any]) -> None:
        line = self.line
        group = line.intake.group(body["group"], body["task"], body["version"])
        line.intake.next_group, line.intake.next_task = body["group"] + 1, body["next_task"]
        line.intake.skipped = body["skipped"]
        line.admission.admit(group.id)
        line.episodes.start(group)

    def _world(self, body: dict[str, Any]) -> None:
        key = TrajectoryId(*body["id"])
        self.line.episodes.on_reply(WorldReply.from_dict(body | {"key": key}))

    def _tokens(self, body: dict[str, Any]) -> None:
        version = body["version"]
        for row in body["rows"]:
            key = TrajectoryId(*row["id"])
            trajectory = self.line.episodes.groups[key.group].samples[key.sample]
            assert trajectory is not None
            if len(trajectory.token_ids) != row["at"]:
                raise ValueError(f"trajectory {key} has {len(trajectory.token_ids)} tokens, not {row['at']}")
            last = len(row["ids"]) - 1
            for index, (token_id, logprob) in enumerate(zip(row["ids"], row["logprobs"], strict=True)):
                finish = row["finish"] if index == last else None
                self.line.episodes.on_token(TokenEvent(key, token_id, logprob, version, row["mixed"], finish))
            self.tokens += len(row["ids"])

    def _commit(self, body: dict[str, Any]) -> None:
        self.line.commit(body["group"])

    def _close(self, body: dict[str, Any]) -> None:
        self.line.close_group(body["group"], Bucket(body["bucket"]))

    def _gradient(self, body: dict[str, Any]) -> None:
        torch.set_num_threads(body["threads"])
        self.line.take_gradient(body["groups"])

    def _step(self, body: dict[str, Any]) -> None:
        line = self.line
        torch.set_num_threads(body["threads"])
        result = line.cell.trainer.step()
        digest = line.cell.trainer.digest()
        self.steps.append((body["step"], body["digest"], digest))
        # Other bits are other weights: KV that was made with the recorded ones is not theirs.
        line.cell.take_step(result, body["weights_id"] if digest == body["digest"] else None)
        groups = line.settle_step(result.gradient)
        self.log(body["step"], groups, body["metrics"])
        line.open_account(line.ledger.to_dict())

    def _lost(self, body: dict[str, Any]) -> None:
        self.line.ledger.generate(body["tokens"])
        self.line.ledger.settle(Bucket.LOST, body["tokens"])


def token_rows(events: Iterable[TokenEvent], line: Production) -> list[dict[str, Any]]:
    """A Decode unit's tokens as a `tokens` event's rows. Called before they are appended."""
    rows: dict[Any, dict[str, Any]] = {}
    for event in events:
        row = rows.get(event.request_id)
        if row is None:
            key = event.request_id
            trajectory = line.episodes.groups[key.group].samples[key.sample]
            assert trajectory is not None
            row = rows[key] = {
                "id": list(key),
                "at": len(trajectory.token_ids),
                "ids": [],
                "logprobs": [],
                "mixed": False,
                "finish": None,
            }
        row["ids"].append(event.token_id)
        row["logprobs"].append(event.logprob)
        row["mixed"] |= event.mixed_kv
        row["finish"] = event.finish_reason
    return list(rows.values())


def refuse_changed(saved: dict[str, Any], config: Config) -> None:
    """Refuse settings that trajectories made under `saved` contradict.

    Raises:
        UserError: which one, and what it was.
    """
    now = config.to_dict()
    for section, names in KEPT_SETTINGS.items():
        for name in names:
            # What is not set is left out.
            then, given = saved[section].get(name), now[section].get(name)
            if then != given:
                raise UserError(
                    f"{section}.{name} was {then!r} when this run was saved and is {given!r} now; a run keeps it to "
                    "its end. For another value begin a new run with model.name = one of this run's checkpoints"
                )
