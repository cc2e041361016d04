"""The line's own state in a checkpoint, and how a line goes on from it.

Invariants
* Everything that decides what the line does next is saved: a resume goes on with the same tasks, counters and
  trajectories, under the same bound. Gradients are not: those of committed groups are taken again.
* Settings that the saved trajectories were made under stay as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.errors import UserError
from headrace.schedule import Admission, Bucket, Ledger
from headrace.trainer import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from headrace.line.production import Production


def save(line: Production) -> None:
    """Write the checkpoint of the last completed step, and remove the oldest ones.

    Raises:
        CheckpointError: the disk refused; the checkpoints before it are intact.
    """
    path = line.folder.checkpoint_path(line.admission.version)
    save_checkpoint(path, line.model.module, line.model.path, line.cell.trainer.state_dict(), _state(line))
    line.folder.prune(line.config.line.keep_checkpoints)


def restore(line: Production) -> int | None:
    """Go on from the last checkpoint, or from step 0 when there is none. Returns its step.

    Raises:
        UserError: the settings are not those of the checkpoint.
    """
    step = line.folder.latest_checkpoint()
    if step is None:
        line.folder.rewind(0)
    else:
        state = load_checkpoint(line.folder.checkpoint_path(step), line.model.module, line.cell.trainer)
        _check_settings(state, line.config)
        line.cell.publish(state["version"], state["weights_id"])
        line.folder.rewind(step)
        _load_state(line, state)
    lost = max(0, line.folder.noted_generated() - line.ledger.generated)
    line.ledger.generate(lost)
    line.ledger.settle(Bucket.LOST, lost)
    line.observer.on_message(
        f"resuming {line.folder.path} at step {step or 0}"
        + (f"; {lost} tokens generated after it are lost" if lost else "")
    )
    return step


def _state(line: Production) -> dict[str, Any]:
    return {
        "version": line.admission.version,
        "group_size": line.config.algorithm.group_size,
        "weight_format": line.config.engine.weight_format,
        "weights_id": line.cell.weights_id,
        "admission": line.admission.state_dict(),
        "ledger": line.ledger.to_dict(),
        "ledger_before": line.account.books,
        "episodes": line.episodes.state_dict(),
        "next_group": line.intake.next_group,
        "next_task": line.intake.next_task,
        "skipped": line.intake.skipped,
        "failed_groups": line.failed_groups,
        "failed_in_a_row": line.failed_in_a_row,
        "replaced": line.replaced,
        "step_seconds": dict(line.cell.seconds),
        "step_elapsed_s": line.account.elapsed_s,
    }


def _load_state(line: Production, state: dict[str, Any]) -> None:
    line.admission = Admission.from_state(state["admission"] | {"steps": line.config.line.steps})
    line.ledger = line.episodes.ledger = Ledger.from_dict(state["ledger"])
    line.intake.next_group, line.intake.next_task = state["next_group"], state["next_task"]
    line.intake.skipped, line.replaced = state["skipped"], state["replaced"]
    line.failed_groups, line.failed_in_a_row = state["failed_groups"], state["failed_in_a_row"]
    line.episodes.load_state(state["episodes"], line.admission.outstanding)
    line.pending = list(line.admission.committed)
    line.open_account(state["ledger_before"], state["step_elapsed_s"])
    line.cell.seconds.update(state["step_seconds"])
    line.metrics.extend(line.folder.metrics())


def _check_settings(saved: dict[str, Any], config: Config) -> None:
    """Refuse settings that the restored state contradicts. More steps than before are welcome."""
    line, state = config.line, saved["admission"]
    kept = {
        "line.groups_per_step": (state["groups_per_step"], line.groups_per_step),
        "line.max_staleness": (state["max_staleness"], line.max_staleness),
        "algorithm.group_size": (saved["group_size"], config.algorithm.group_size),
        # A trajectory never changes format: its log-probs are those of one policy.
        "engine.weight_format": (saved.get("weight_format", "float32"), config.engine.weight_format),
    }
    for name, (then, now) in kept.items():
        if then != now:
            raise UserError(
                f"{name} was {then} when this run was saved and is {now} now; a run keeps it to its end"
            )
    started = state["consumed"] + len(state["outstanding"])
    if line.steps * line.groups_per_step < started:
        raise UserError(
            f"line.steps = {line.steps} is too few: this run has completed {state['version']} steps and started "
            f"groups for {-(-started // line.groups_per_step)}"
        )
