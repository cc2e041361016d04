"""headrace's side of the rows about damage: each request damages one kind of state again and again and tries to use it.

Settings: `run`, the folder of a finished run of `tiny-random`. A request: `what` (disk, segment, journal, checkpoint),
`count`, `seed`. -> `cases`, each `[damage, outcome]`, where an outcome is

    detected   it was refused or counted, and nothing of it was used
    harmless   what came out is exactly what comes out of undamaged state
    wrong      anything else; `damage` then says more
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import contextlib
import os
import random
import resource
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.algorithms import load_algorithm
from headrace.config import AlgorithmConfig, EngineConfig, TrainerConfig
from headrace.engine import Engine
from headrace.errors import CheckpointError, HeadraceError, RunError, UserError
from headrace.models import LoadedModel, load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.journal import Journal, JournalDamaged, Stored
from headrace.state.shared_memory import segment_path
from headrace.state.weights import WeightReader, WeightStore, content_digest
from headrace.trainer import Trainer, load_checkpoint, save_checkpoint
from headrace.types import Sampling

DETECTED, HARMLESS, WRONG = "detected", "harmless", "wrong"
BYTES = ("flip", "flip", "flip", "zeros", "cut", "more", "empty", "delete", "elsewhere")
"""Damage to a file's bytes; `elsewhere` puts another file of the same kind in its place, and is what a wrong identity
and a wrong layout come to."""

NOBODY = 65534


def damage(rng: random.Random, how: str, path: Path, other: Path) -> None:
    """Damage a file.

    Args:
        other: a file of the same kind that belongs elsewhere.
    """
    data = bytearray(path.read_bytes())
    if how == "flip":
        for _ in range(rng.choice((1, 1, 3, 64))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "zeros":
        at = rng.randrange(len(data))
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "more":
        data += rng.randbytes(rng.randrange(1, 5000))
    elif how == "empty":
        data.clear()
    elif how == "elsewhere":
        data = bytearray(other.read_bytes())
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(data)


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes: the system refuses the write, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in the folder can be written; root is somebody else meanwhile, since no mode stops it."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


def fresh_copy(source: Path, target: Path) -> Path:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return target


class Damage:
    """What is damaged, and how it is used.

    Args:
        run: a finished run.
        folder: scratch space.
    """

    def __init__(self, run: Path, folder: Path) -> None:
        folder.chmod(0o755)
        self.run, self.folder = run, folder
        self.checkpoints = sorted((run / "checkpoints").iterdir())
        self.found = 0
        """Tokens whose KV the last engine found."""

    def model(self) -> LoadedModel:
        return load_model(resolve("tiny-random"), attn_implementation=ATTENTION)

    def disk(self, rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
        """KV blocks: an engine over a damaged folder gives the tokens and log-probs of one without a cache."""
        prompts = [[rng.randrange(5, 250) for _ in range(60)] for _ in range(3)]
        model, others = self.model(), self.model()
        with torch.no_grad():
            next(others.module.parameters()).mul_(1.01)
        plain = {"context_length": 128, "max_sequences": 4}
        expected = self._answers(model, prompts, EngineConfig(**plain, prefix_cache_mb=0))[0]
        good = self.folder / "good"
        for each in (others, model, model):
            self._answers(each, prompts, self._tiered(plain, good))
        if not self.found:
            raise RunError("nothing was read from the undamaged disk")
        mine = max(sorted(good.iterdir()), key=lambda path: path.stat().st_mtime)
        files = [path for path in sorted(good.rglob("*.kv"))]
        ours = [path for path in files if mine in path.parents]
        theirs = [path for path in files if mine not in path.parents]
        hows = (*BYTES, "full disk", "read-only folder", "folder deleted", "folder is a file", "foreign file")
        for number in range(count):
            how = hows[number % len(hows)]
            now = fresh_copy(good, self.folder / "now")
            config, around = self._tiered(plain, now), contextlib.nullcontext()
            if how in BYTES:
                damage(rng, how, now / rng.choice(ours).relative_to(good), rng.choice(theirs))
            elif how == "full disk":
                around = full_disk(1000)  # type: ignore[assignment]
                shutil.rmtree(now)
            elif how == "read-only folder":
                around = read_only(now)  # type: ignore[assignment]
            elif how == "folder deleted":
                shutil.rmtree(now / mine.name)
            elif how == "folder is a file":
                shutil.rmtree(now)
                now.write_bytes(b"not a folder")
            else:
                (now / mine.name / "foreign.kv").write_bytes(rng.randbytes(3000))
            try:
                with around:
                    answers, seen = self._answers(model, prompts, config)
            except UserError:
                yield how, DETECTED
                continue
            # What a damaged folder was made to hold is used by somebody else next.
            again, seen_again = self._answers(model, prompts, self._tiered(plain, now))
            if answers != expected or again != expected:
                yield how, WRONG
            else:
                yield how, DETECTED if seen or seen_again else HARMLESS

    def segment(self, rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
        """Weights in shared memory: a reader gets what was published, or refuses."""
        model, others = self.model(), torch.nn.Linear(50, 40)
        name, elsewhere = (f"damage-{uuid.uuid4().hex[:12]}" for _ in range(2))
        hows = (*BYTES, "full disk")
        with WeightStore(elsewhere, others) as stranger:
            stranger.publish(1, "others")
            for number in range(count):
                how = hows[number % len(hows)]
                if how == "full disk":
                    yield how, self._refused(lambda: WeightStore(name, model.module), UserError)
                    continue
                store = WeightStore(name, model.module)
                reader = None
                try:
                    for version in range(rng.choice((1, 2, 3))):
                        with torch.no_grad():
                            next(model.module.parameters()).add_(0.001)
                        store.publish(version, f"w{version}")
                    # Half of the readers were there before.
                    reader = WeightReader(name) if number % 2 else None
                    self._damage_segment(rng, how, segment_path(name), segment_path(elsewhere))
                    yield how, self._reads(name, reader, model)
                finally:
                    if reader is not None:
                        reader.close()
                    segment_path(name).unlink(missing_ok=True)
                    store.close()

    def journal(self, rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
        """The journal: what is read is what was written, or the damage is named; what stands before it is salvaged."""
        good = self.run / "journal.sqlite"
        written = self._records(good)
        journal = Journal.open(good, read_only=True)
        self.mark = journal.mark
        journal.close()
        other = self.folder / "other.sqlite"
        journal = Journal.open(other)
        journal.record("start", "other")
        journal.commit()
        journal.close()
        hows = (*BYTES, "full disk", "read-only folder")
        for number in range(count):
            how = hows[number % len(hows)]
            place = self.folder / "journal"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o755)
            path = fresh_copy(good, place / "journal.sqlite")
            if how == "full disk":
                yield how, self._refused(lambda path=path: self._append(path, 1 << 20), RunError)
            elif how == "read-only folder":
                with read_only(place):
                    yield how, self._refused(lambda path=path: self._append(path, 10), RunError, limit=None)
            else:
                damage(rng, how, path, other)
                yield how, self._salvages(path, written)

    def checkpoint(self, rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
        """Checkpoints: what is loaded is what was saved, or it is refused and nothing has changed."""
        good, older = self.checkpoints[-1], self.checkpoints[-2]
        names = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
        model, reference = self.model(), self.model()
        trainer, saved = (self._trainer(each) for each in (model, reference))
        state = load_checkpoint(good, reference.module, saved)
        hows = (*BYTES, "full disk", "read-only folder", "no manifest entry")
        for number in range(count):
            how = hows[number % len(hows)]
            now = fresh_copy(good, self.folder / "checkpoint")
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.fill_(0.5)
            before = trainer.digest()
            if how in ("full disk", "read-only folder"):
                around = full_disk(4096) if how == "full disk" else read_only(self.folder)
                with around:
                    outcome = self._refused(
                        lambda now=now: save_checkpoint(now, model.module, model.path, trainer.state_dict()),
                        CheckpointError,
                        limit=None,
                    )
                # The one that stood there stands there still.
                loaded = load_checkpoint(now, model.module, trainer)
                intact = loaded == state and trainer.digest() == saved.digest()
                yield how, outcome if intact else WRONG
                continue
            if how == "no manifest entry":
                (now / "manifest.json").write_text('{"files": {}}', encoding="utf-8")
            else:
                name = rng.choice(names)
                damage(rng, how, now / name, older / name)
            try:
                loaded = load_checkpoint(now, model.module, trainer)
            except UserError:
                yield how, DETECTED if trainer.digest() == before else WRONG
            else:
                same = loaded == state and trainer.digest() == saved.digest()
                yield how, HARMLESS if same else WRONG

    def _tiered(self, plain: dict[str, Any], folder: Path) -> EngineConfig:
        return EngineConfig(**plain, prefix_cache_mb=1, kv_disk_mb=8, kv_disk_folder=str(folder))

    def _answers(
        self, model: LoadedModel, prompts: list[list[int]], config: EngineConfig
    ) -> tuple[list[Any], bool]:
        """What the engine says, and whether it counted anything that is wrong with its disk."""
        engine = Engine(model, config, content_digest(model.module))
        disk = engine.directory.disk
        results = []
        for number, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=4, ignore_eos=True)
            engine.submit(number, prompt, sampling, random_key=number, keep_kv=True)
            while engine.num_unfinished:
                results += [(event.token_id, event.logprob) for event in engine.step()]
        self.found = engine.cache.hit_tokens
        engine.close()
        if disk is None:
            return results, False
        return results, bool(disk.counters.corrupt or disk.counters.errors or disk.note)

    def _damage_segment(self, rng: random.Random, how: str, path: Path, other: Path) -> None:
        """As `damage`, but in place, since shared memory is mapped."""
        if how in ("delete", "elsewhere"):
            path.unlink()
            if how == "elsewhere":
                shutil.copyfile(other, path)
            return
        changed = path.with_name(f"{path.name}-changed")
        shutil.copyfile(path, changed)
        try:
            damage(rng, how, changed, changed)
            data = changed.read_bytes()
        finally:
            changed.unlink()
        file = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(file, len(data))
            os.pwrite(file, data, 0)
        finally:
            os.close(file)

    def _reads(self, name: str, reader: WeightReader | None, model: LoadedModel) -> str:
        try:
            reader = reader or WeightReader(name)
            reader.check(model.module)
            pinned = reader.pin(timeout_s=0.02)
        except HeadraceError:
            return DETECTED
        expected = model.module.state_dict()
        same = set(expected) == set(pinned.tensors)
        same = same and all(torch.equal(expected[key], value) for key, value in pinned.tensors.items())
        pinned.release()
        reader.close()
        return HARMLESS if same else WRONG

    def _records(self, path: Path, into: list[Stored] | None = None) -> list[Stored]:
        """A journal's records, appended to `into` one by one: those before damage are there even so."""
        records = [] if into is None else into
        journal = Journal.open(path, read_only=True)
        try:
            for stored in journal.read():
                records.append(stored)
        finally:
            journal.close()
        return records

    def _append(self, path: Path, size: int) -> None:
        journal = Journal.open(path)
        try:
            journal.record("more", "x" * size)
            journal.commit()
        finally:
            journal.close()

    def _salvages(self, path: Path, written: list[Stored]) -> str:
        found: list[Stored] = []
        detected = False
        try:
            journal = Journal.open(path, read_only=True)
            ours = journal.holds(self.mark)
            journal.close()
            if not ours:
                # What it holds is whole, and not what a checkpoint names.
                return DETECTED
        except (JournalDamaged, UserError):
            pass
        try:
            self._records(path, found)
        except (JournalDamaged, UserError):
            detected = True
        if found != written[: len(found)] or (not detected and len(found) < len(written)):
            return WRONG
        try:
            Journal.open(path).close()
        except JournalDamaged:
            salvaged = Journal.salvage(path)
            if salvaged is None or salvaged.last_seq != len(found):
                return WRONG
            detected = True
        again = self._records(path)
        if again != written[: len(again)] or len(again) < len(found):
            return WRONG
        return DETECTED if detected else HARMLESS

    def _refused(
        self, action: Callable[[], Any], error: type[HeadraceError], limit: int | None = 4096
    ) -> str:
        try:
            with full_disk(limit) if limit else contextlib.nullcontext():
                action()
        except error:
            return DETECTED
        return WRONG

    def _trainer(self, model: LoadedModel) -> Trainer:
        return Trainer(model.module, load_algorithm(AlgorithmConfig()), TrainerConfig(), total_steps=10)


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(1)
    scratch = tempfile.mkdtemp(prefix="headrace-bench-")
    try:
        damaged = Damage(Path(settings["run"]), Path(scratch))

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            rng = random.Random(request["seed"])
            return {"cases": list(getattr(damaged, request["what"])(rng, request["count"]))}

        serving.serve({}, answer)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
