"""Checkpoints: a folder in Hugging Face format, with the optimizer's and the line's state beside the weights.

    config.json, model.safetensors, tokenizer files …   loads with transformers.AutoModelForCausalLM
    optimizer.safetensors                               AdamW's moments by parameter name
    trainer.json, line.json                             counters of the trainer; the line's own state
    manifest.json                                       size and SHA-256 of every other file

Invariants
* A checkpoint appears whole or not at all, and writing one never touches another.
* What is loaded is exactly what was saved: sizes and digests are checked before anything is changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, UserError
from headrace.files import atomic_folder
from headrace.models.quiet import quiet_transformers
from headrace.trainer.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer.json"
LINE = "line.json"

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)
"""Names of the files that make a tokenizer, as glob patterns."""


class SavesPretrained(Protocol):
    """A transformers tokenizer, or anything else that can write itself into a folder."""

    def save_pretrained(self, save_directory: Any) -> Any: ...


def save_checkpoint(
    path: str | Path,
    module: PreTrainedModel,
    tokenizer: SavesPretrained | str | Path,
    trainer_state: dict[str, Any] | None = None,
    line_state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint at `path`, atomically; one that stands there already is replaced.

    Args:
        module: a Hugging Face model.
        tokenizer: what to save beside it: a tokenizer, or a folder whose tokenizer files are copied.
        trainer_state: `Trainer.state_dict()`; without it the folder holds a model that cannot be trained on.
        line_state: plain data, saved as JSON.

    Raises:
        CheckpointError: the disk refused (it is full, say); no part of the checkpoint is left and the one
            before is intact.
    """
    path = Path(path)
    try:
        with quiet_transformers(), atomic_folder(path) as folder:
            module.save_pretrained(folder)
            _save_tokenizer(tokenizer, folder)
            if trainer_state is not None:
                moments = {
                    name: moment.detach().contiguous() for name, moment in trainer_state["moments"].items()
                }
                save_file(moments, folder / OPTIMIZER)
                _write_json(folder / TRAINER, {"steps": trainer_state["steps"]})
            if line_state is not None:
                _write_json(folder / LINE, line_state)
            _write_json(folder / MANIFEST, {"files": _manifest(folder)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {_reason(error)}; {_previous(path)}") from error


def verify_checkpoint(path: str | Path) -> None:
    """Check that every file of a checkpoint is there as it was written.

    Raises:
        UserError: it is missing or damaged.
    """
    path = Path(path)
    manifest = _read_json(path, MANIFEST).get("files")
    if not isinstance(manifest, dict):
        raise _damaged(path, f"{MANIFEST} lists no files")
    for name, entry in manifest.items():
        file = path / name
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            raise _damaged(path, f"{MANIFEST} does not say what {name} is")
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}")
        if _digest(file) != entry["sha256"]:
            raise _damaged(path, f"{name} is not what was written")
    # Others may lie here, but nothing that is loaded.
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".safetensors") and file.name not in (*manifest, MANIFEST):
            raise _damaged(path, f"{MANIFEST} does not list {file.name}")


def load_checkpoint(
    path: str | Path, module: PreTrainedModel, trainer: Trainer | None = None
) -> dict[str, Any]:
    """Put a checkpoint's weights into `module` and its state into `trainer`.

    Returns:
        The line's state, empty if none was saved.

    Raises:
        UserError: the checkpoint is missing, damaged or another model's; nothing was changed.
    """
    path = Path(path)
    verify_checkpoint(path)
    line_state = _read_json(path, LINE) if (path / LINE).exists() else {}
    trainer_state = None
    if trainer is not None:
        if not (path / OPTIMIZER).exists():
            raise UserError(
                f"{path} holds a model without optimizer state; resume from a folder under checkpoints/"
            )
        trainer_state = {**_read_json(path, TRAINER), "moments": load_file(path / OPTIMIZER)}
    # Through transformers, since names in the file may differ from the module's (experts are stored one by
    # one).
    with quiet_transformers():
        saved = type(module).from_pretrained(path, dtype=module.dtype, local_files_only=True)
    weights, expected = saved.state_dict(), module.state_dict()
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in expected.items()}:
        raise UserError(f"{path} holds another model than the run's; resume with the run's own model")
    if trainer is not None and trainer_state is not None:
        trainer.load_state_dict(trainer_state)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])
    return line_state


def _save_tokenizer(tokenizer: SavesPretrained | str | Path, folder: Path) -> None:
    if not isinstance(tokenizer, (str, Path)):
        tokenizer.save_pretrained(folder)
        return
    for pattern in TOKENIZER_FILES:
        for file in sorted(Path(tokenizer).glob(pattern)):
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, folder / file.name)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in files
    }


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"{path} is not a checkpoint: there is no such folder")
    try:
        data = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _damaged(path, f"{name} is missing") from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise _damaged(path, f"{name} holds no object")
    return data


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"checkpoint {path} is incomplete or damaged ({what}); remove that folder to go on from the one before it"
    )


def _reason(error: OSError | SafetensorError) -> str:
    """The operating system's words for it; safetensors hides them in its own message."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
    return next((os.strerror(code) for code in known if os.strerror(code) in str(error)), str(error))


def _previous(path: Path) -> str:
    """What is left to go on from, in words."""
    others = [
        folder
        for parent in (path.parent, path.parent / "checkpoints")
        for folder in parent.glob("[!.]*")
        if (folder / MANIFEST).is_file() and (folder / OPTIMIZER).is_file()
    ]
    if not others:
        return "there is no checkpoint before it"
    newest = max(others, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    return f"the checkpoint before it is intact: {newest}"
