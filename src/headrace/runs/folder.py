"""The folder of one run: settings, metrics, trajectories, checkpoints, and what went wrong.

    config.toml            the resolved settings
    metrics.jsonl          one object per step; numbers that are not finite are null
    tensorboard/           the same scalars
    trajectories.jsonl     every trajectory that a step consumed
    checkpoints/step-N/    the state after N steps
    tokens_generated       how many tokens the run has sampled, for the books after a crash
    journal.sqlite         what the line did, event by event
    failures/step-N.jsonl  the trajectories that stopped step N
    final/                 the trained model

Invariants
* The folder, each checkpoint and `final/` appear complete or not at all.
* Steps count from 1: a log line of step N describes the N-th optimizer step, and `checkpoints/step-N` is the
  state after it. So `rewind(0)` leaves no step in the logs.
* One process writes to a folder at a time: a lock is held from `create` or `open` to `close`, and the system
  releases it when the process dies.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import tomli_w

from headrace.config import Config
from headrace.errors import RunError, UserError
from headrace.files import (
    atomic_folder,
    remove_folder,
    remove_temporaries,
    write_atomic,
)
from headrace.locks import lock_file
from headrace.runs.results import EvaluatedTask, Evaluation
from headrace.runs.state import Settled
from headrace.types import Trajectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"
CHECKPOINTS = "checkpoints"
GENERATED = "tokens_generated"
JOURNAL = "journal.sqlite"
LOCK = ".lock"

LOCK_WAIT_S = 0.3
"""How long a lock that is taken is waited for: a process that is ending holds it for an instant more."""

_CHECKPOINT_NAME = re.compile(r"step-(0|[1-9]\d*)")


class RunFolder:
    """One run's folder, held exclusively by this process unless it was opened to read only.

    Use `create`, `open` and, at the end, `close` (or a `with` block).

    Attributes:
        path: the folder, absolute.
        config: the run's resolved settings.
    """

    def __init__(self, path: Path, config: Config, lock: int | None) -> None:
        self.path = path
        self.config = config
        self._lock = lock
        self._generated: int | None = None
        self._scalars: SummaryWriter | None = None
        self._purge_step: int | None = None

    @classmethod
    def create(cls, path: str | Path, config: Config) -> Self:
        """Make a new run folder, complete with its settings, and lock it.

        Raises:
            UserError: the path exists already or cannot be written.
        """
        path = Path(path).absolute()
        cls.refuse_existing(path)
        try:
            with atomic_folder(path, replace=False) as temporary:
                (temporary / CONFIG).write_text(tomli_w.dumps(config.to_dict()), encoding="utf-8")
                (temporary / CHECKPOINTS).mkdir()
            lock = _lock(path)
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            raise UserError(
                f"run folder {path} cannot be made: {error.strerror}; pick another --run-dir"
            ) from None
        return cls(path, config, lock)

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False) -> Self:
        """Open an existing run folder.

        Args:
            path: the folder.
            read_only: only to read. Otherwise the run is to continue: the folder is locked, and what a crash
                left half made in it is removed.

        Raises:
            UserError: not a run folder, its settings are unreadable, or another run is writing to it.
        """
        path = Path(path).absolute()
        if not (path / CONFIG).is_file():
            raise UserError(
                f"{path} is not a run folder (no {CONFIG} in it): give the folder of an earlier run"
            )
        config = Config.load(path / CONFIG)
        if read_only:
            return cls(path, config, None)
        try:
            lock = _lock(path)
        except OSError as error:
            raise UserError(
                f"run folder {path} cannot be locked: {error.strerror}; make it writable or copy it elsewhere"
            ) from None
        folder = cls(path, config, lock)
        try:
            (path / CHECKPOINTS).mkdir(exist_ok=True)
            for parent in (path, path / CHECKPOINTS):
                remove_temporaries(parent)
        except OSError as error:
            folder.close()
            raise UserError(f"run folder {path} cannot be cleaned up: {error}; make it writable") from None
        return folder

    @property
    def complete(self) -> bool:
        """Whether the run has done everything its settings ask for."""
        steps = self.config.line.steps
        if self.latest_checkpoint() != steps:
            return False
        # What lies in `final/` and in the evaluation may be of an earlier end, before `line.steps` was raised.
        weights = _weights_in(self.checkpoint_path(steps))
        after = self.evaluation("after")
        measured = not self.config.eval.tasks or (after is not None and after.step == steps)
        return measured and bool(weights) and _weights_in(self.final_path) == weights

    @staticmethod
    def refuse_existing(path: str | Path) -> None:
        """Raise the `UserError` of `create` for a path that exists."""
        path = Path(path).absolute()
        if os.path.lexists(path):
            raise _exists(path)
        blocked = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
        if blocked is not None:
            raise UserError(f"run folder {path} cannot be made: {blocked} is a file; pick another --run-dir")

    @staticmethod
    def fresh(base: str | Path, stem: str) -> Path:
        """The first unused path among `base/stem-001`, `base/stem-002`, ... above every used number."""
        base = Path(base)
        name = re.compile(re.escape(stem) + r"-(\d+)")
        used = [int(m[1]) for entry in base.glob("*") if (m := name.fullmatch(entry.name))]
        return base / f"{stem}-{max(used, default=0) + 1:03d}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flush TensorBoard and release the lock. May be called twice."""
        try:
            if self._scalars is not None:
                self._scalars.close()
        finally:
            self._scalars = None
            if self._generated is not None:
                os.close(self._generated)
                self._generated = None
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    # Logs

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one step's metrics to `metrics.jsonl` and its numbers to TensorBoard.

        Args:
            metrics: plain values by name; `step` is required.

        Raises:
            RunError: the disk refused.
        """
        step = _step_of(metrics)
        line = {"step": step} | {name: value for name, value in metrics.items() if name != "step"}
        self._append(METRICS, [line])
        with self._writing("tensorboard"):
            writer = self._tensorboard()
            for name, value in line.items():
                if name != "step" and _is_number(value) and math.isfinite(value):
                    writer.add_scalar(name, float(value), step)
            writer.flush()

    def append_trajectories(self, step: int, consumed: Iterable[Settled]) -> None:
        """Append the trajectories that `step` consumed to `trajectories.jsonl`.

        Each line holds step, group, sample, attempt, task, completion, reward, advantage, finish_reason, temperature,
        and per token: token_ids, sampled (0 or 1), logprobs, versions.

        Raises:
            RunError: the disk refused.
        """
        lines = (_trajectory_line(step, one.task, one.attempt.trajectory, one.advantage) for one in consumed)
        self._append(TRAJECTORIES, lines)

    def metrics(self) -> list[dict[str, Any]]:
        """The readable lines of `metrics.jsonl`, oldest first."""
        path = self.path / METRICS
        if not path.exists():
            return []
        with path.open("rb") as lines:
            return [line for raw in lines if (line := _decode(raw)) is not None]

    def rewind(self, step: int) -> dict[str, int]:
        """Forget every log line of a later step, and a last line that a crash tore.

        Returns:
            By log, the step of its last line now, 0 for none: less than `step` if lines are missing.

        Raises:
            RunError: the disk refused.
        """
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None
        # TensorBoard's files cannot be cut: the next writer tells it to hide the events from this step on.
        self._purge_step = step + 1
        last = {}
        for name in (METRICS, TRAJECTORIES):
            with self._writing(name):
                last[name] = _cut_after(self.path / name, step)
        return last

    def note_generated(self, tokens: int) -> None:
        """Remember how many tokens the run has generated, so that a crash cannot hide what it loses.

        Raises:
            RunError: the disk refused.
        """
        with self._writing(GENERATED):
            if self._generated is None:
                self._generated = os.open(self.path / GENERATED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # Always as long as before, so that no instant shows half of it.
            os.pwrite(self._generated, f"{tokens:020d}\n".encode(), 0)

    def noted_generated(self) -> int:
        """The number last noted, 0 if there is none."""
        path = self.path / GENERATED
        text = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
        return int(text) if text.isdecimal() else 0

    def save_offenders(self, step: int, trajectories: Iterable[Trajectory], reason: str) -> Path:
        """Write the trajectories that stopped a step to `failures/step-N.jsonl`, the reason in each line.

        Raises:
            RunError: the disk refused.
        """
        path = self.path / "failures" / f"step-{step}.jsonl"
        lines = [{"step": step, "reason": reason} | trajectory.to_dict() for trajectory in trajectories]
        with self._writing(str(path.relative_to(self.path))):
            write_atomic(path, b"".join(map(_encode, lines or [{"step": step, "reason": reason}])))
        return path

    def write_evaluation(self, name: str, evaluation: Evaluation) -> None:
        """Keep a held-out evaluation as `evaluation-<name>.json`.

        Raises:
            RunError: the disk refused.
        """
        file = f"evaluation-{name}.json"
        data = json.dumps(json_safe(asdict(evaluation)), indent=1, ensure_ascii=False)
        with self._writing(file):
            write_atomic(self.path / file, data.encode("utf-8", "replace"))

    def evaluation(self, name: str) -> Evaluation | None:
        """A held-out evaluation that was kept; None if there is none, or none that can be read."""
        path = self.path / f"evaluation-{name}.json"
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            reward = float("nan") if data["reward"] is None else data["reward"]
            tasks = [EvaluatedTask(**task) for task in data["tasks"]]
            return Evaluation(data["step"], reward, tasks, data["failed"], data.get("skipped", 0))
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not readable and is ignored: %s", path, error)
            return None

    @property
    def journal_path(self) -> Path:
        """The run's journal (`state/journal.py`)."""
        return self.path / JOURNAL

    # Checkpoints

    @property
    def final_path(self) -> Path:
        """Where the trained model goes at the end of the run."""
        return self.path / "final"

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is or will be."""
        return self.path / CHECKPOINTS / f"step-{step}"

    def checkpoints(self) -> list[int]:
        """The steps that have a complete checkpoint, oldest first."""
        folder = self.path / CHECKPOINTS
        entries = folder.iterdir() if folder.is_dir() else ()
        return sorted(
            int(match[1])
            for entry in entries
            if (match := _CHECKPOINT_NAME.fullmatch(entry.name)) and entry.is_dir()
        )

    def latest_checkpoint(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return max(self.checkpoints(), default=None)

    def prune(self, keep: int) -> list[int]:
        """Remove all but the `keep` newest checkpoints (at least 1) and return the removed steps.

        Raises:
            RunError: the disk refused.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        removed = self.checkpoints()[:-keep]
        for step in removed:
            with self._writing(CHECKPOINTS):
                remove_folder(self.checkpoint_path(step))
        return removed

    # Inside

    def _append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        with self._writing(name), (self.path / name).open("ab") as stream:
            for line in lines:
                stream.write(_encode(line))

    def _tensorboard(self) -> SummaryWriter:
        if self._scalars is None:
            # Imported here because only a run that logs needs it, and it is slow to load.
            from torch.utils.tensorboard import SummaryWriter

            self._scalars = SummaryWriter(str(self.path / "tensorboard"), purge_step=self._purge_step)
        return self._scalars

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Refuse to write without the lock, and turn the disk's refusal into one line."""
        if self._lock is None:
            raise RuntimeError(f"run folder {self.path} is closed or open to read only")
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {what} in {self.path}: {error.strerror or error}; mend it, then continue with "
                f"--resume {self.path}"
            ) from error


def _exists(path: Path) -> UserError:
    return UserError(
        f"{path} exists already: pick another --run-dir, or continue that run with --resume {path}"
    )


def _lock(folder: Path) -> int:
    """Take a folder's exclusive lock and return the descriptor that holds it.

    Raises:
        UserError: another process holds it, and still does after `LOCK_WAIT_S`.
        OSError: the lock's file cannot be opened.
    """
    try:
        return lock_file(folder / LOCK, timeout_s=LOCK_WAIT_S)
    except TimeoutError:
        raise UserError(
            f"another run is writing to {folder}: wait for it or stop it, or pick another --run-dir"
        ) from None


def _weights_in(folder: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says of its weights; nothing if it cannot be read."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        return {
            name: entry for name, entry in files.items() if name.startswith("model") and "safetensors" in name
        }
    except (OSError, ValueError, KeyError, AttributeError):
        return {}


def _cut_after(path: Path, step: int) -> int:
    """Cut a log, if there is one, after its last readable line of `step` or before; returns that line's step, or 0.

    Only what is cut is read.
    """
    if not path.exists() or not path.stat().st_size:
        return 0
    last = 0
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = len(data)
            while end:
                start = data.rfind(b"\n", 0, end - 1) + 1
                line = _decode(data[start:end])
                if line is None:
                    logger.warning("%s: a line is not readable (torn by a crash?) and is dropped", path)
                elif (last := _step_of(line)) <= step:
                    break
                end, last = start, 0
        file.truncate(end)
    return last


def _decode(raw: bytes) -> dict[str, Any] | None:
    """The object of one complete line that has a step, otherwise None."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _encode(line: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError):  # something in it is no JSON
        text = json.dumps(json_safe(line), allow_nan=False, ensure_ascii=False)
    # Readers that split at every Unicode line break must not see one inside a line.
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace") + b"\n"


def json_safe(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite become null, unknown objects their text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _step_of(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    if not isinstance(step, int):
        raise ValueError(f"a log line needs a whole number `step`, not {step!r}")
    return step


def _trajectory_line(
    step: int, task: Mapping[str, Any], trajectory: Trajectory, advantage: float | None
) -> dict[str, Any]:
    values = trajectory.to_dict()
    group, sample, attempt = values.pop("id")
    line = {"step": step, "group": group, "sample": sample, "attempt": attempt, "task": task}
    line |= {name: values.pop(name) for name in ("completion", "reward")}
    if advantage is not None:
        line["advantage"] = advantage
    return line | {name: values.pop(name) for name in ("finish_reason", "temperature")} | values
