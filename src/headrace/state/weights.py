"""Weights: what they are, and how other processes get them.

An identity differs whenever weights do. Version 0 is named by a digest of its content, later versions by a fresh name
at each publish, so that "version 5" of two runs is never taken for the same thing.

A `WeightStore` publishes a module's weights in shared memory, a `WeightReader` in another process uses them there.

Invariants
* A publish is one copy, and atomic: a reader sees all of the old version or all of the new one, also when the publisher
  is killed in its middle.
* A buffer that a reader has pinned is never written. A reader that dies releases its pins.
* Some whole version is in force from the first publish on. The older buffer is written if nobody uses it; else the
  newer one, if nobody uses that: its version is then withdrawn unread, so a reader that does not move stops nobody.
* At most two versions are in memory.
* What a reader gets has the fingerprint that was published, or it is refused.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from headrace.errors import LineStuckError, UserError
from headrace.kernels.fingerprint import fingerprint
from headrace.locks import try_lock, unlock
from headrace.state.shared_memory import (
    PUBLISHER,
    READERS,
    Published,
    Segment,
    SharedMemoryError,
    difference,
    layout_of,
    pin_byte,
    reader_byte,
    remove_damaged,
    segment_names,
    segment_path,
)

_RETRY_S = 0.002
_REMOVAL_S = 0.1


def content_digest(module: nn.Module) -> str:
    """A digest of names, dtypes, shapes and bytes of every parameter and persistent buffer."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return f"content-{digest.hexdigest()[:32]}"


def mint() -> str:
    """A new identity for weights that were just published."""
    return f"published-{uuid.uuid4().hex}"


class WeightStore:
    """The publisher of a module's weights under a name. A new store holds nothing before the first `publish`.

    What a dead publisher of the same model left is taken over: its readers go on with its last version (`published`)
    until the next one. What it left of another model is replaced. A new store removes what nobody uses any more.

    Args:
        module: its parameters and persistent buffers are what is published; whoever owns it changes them in place.
        timeout_s: the longest that a publish waits while readers use both versions.

    Raises:
        UserError: another process publishes under this name, or there is too little shared memory.
    """

    def __init__(self, name: str, module: nn.Module, *, timeout_s: float = 60.0) -> None:
        self.name, self.module, self.timeout_s = name, module, timeout_s
        self._layout = layout_of(module.state_dict())
        self._segment = self._take_over() or self._create()
        newest = self._segment.newest()
        self.published: Published | None = newest[1] if newest else None
        """The version that readers get now."""
        self._current = newest[0] if newest else 1
        self._sequence = self.published.sequence if self.published else 0

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, two versions."""
        return 2 * self._segment.size

    @property
    def readers(self) -> list[str]:
        """Who is attached."""
        return [self._segment.reader_name(i) for i in range(READERS) if self._segment.held(reader_byte(i))]

    def publish(self, version: int, weights_id: str) -> Published:
        """Copy the module's weights and make them the newest version.

        Raises:
            LineStuckError: readers used both versions until the time was over; the last one stays the newest.
            UserError: the module's tensors are no longer those that the store was made for.
        SharedMemoryError: somebody removed the segment, so that no reader would find the version.
        """
        self._segment.check()
        tensors = self.module.state_dict()
        if change := difference(self._layout, layout_of(tensors)):
            raise UserError(f"shared weights {self.name!r}: the model has changed: {change}")
        with self._writable_buffer(version) as target:
            self._segment.clear(target)
            # What stays in force if this publish fails.
            self._current, self.published = 1 - target, self._segment.descriptor(1 - target)
            places = self._segment.tensors(target, writable=True)
            for entry in self._layout:
                places[entry.names[0]].copy_(tensors[entry.names[0]])
            content = fingerprint(self._segment.memory(target, writable=True))
            published = Published(self._sequence + 1, version, weights_id, content)
            self._segment.commit(target, published)
        self._current, self.published, self._sequence = target, published, published.sequence
        return published

    def close(self) -> None:
        """Remove the store. Readers keep what they use; they find nothing new."""
        if self._segment.file < 0:
            return
        self._segment.remove()
        self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writable_buffer(self, version: int) -> Iterator[int]:
        """A buffer that no reader uses, and none can pin inside the block; another one holds a version."""
        deadline = time.monotonic() + self.timeout_s
        buffer = 1 - self._current
        while (holder := self._lock(buffer)) is not None:
            both = self._segment.descriptor(buffer) is not None and self.published is not None
            if both and self._lock(self._current) is None:
                buffer = self._current
                break
            if time.monotonic() >= deadline:
                old = self._segment.descriptor(buffer)
                raise LineStuckError(
                    f"publishing weights version {version} waited {self.timeout_s:g} s for reader "
                    f"{self._segment.reader_name(holder)!r}, which still uses version "
                    f"{'?' if old is None else old.version} while another uses the next; is it stuck? End it, or "
                    "give it more time"
                )
            time.sleep(_RETRY_S)
        try:
            yield buffer
        finally:
            self._unlock(buffer, READERS)

    def _lock(self, buffer: int) -> int | None:
        """Keep readers from a buffer. Returns None, or a reader that uses it; nothing is kept then."""
        for reader in range(READERS):
            if not try_lock(self._segment.file, pin_byte(buffer, reader), exclusive=True):
                self._unlock(buffer, reader)
                return reader
        return None

    def _unlock(self, buffer: int, readers: int) -> None:
        for reader in range(readers):
            unlock(self._segment.file, pin_byte(buffer, reader))

    def _take_over(self) -> Segment | None:
        path = segment_path(self.name)
        try:
            segment = Segment.open(path)
        except FileNotFoundError:
            return None
        except SharedMemoryError:
            remove_damaged(path)
            return None
        # `remove_abandoned` holds it for a moment.
        deadline = time.monotonic() + _REMOVAL_S
        while not try_lock(segment.file, PUBLISHER, exclusive=True):
            if time.monotonic() >= deadline:
                segment.close()
                raise UserError(
                    f"another process publishes weights as {self.name!r}; choose another name, or end it"
                )
            time.sleep(_RETRY_S)
        try:
            segment.check()
            segment.newest()
            if segment.layout == self._layout:
                return segment
        except SharedMemoryError:
            pass
        segment.remove()
        segment.close()
        return None

    def _create(self) -> Segment:
        # Nobody else gives back the memory of a publisher that was killed.
        remove_abandoned()
        try:
            return Segment.create(segment_path(self.name), self._layout)
        except FileExistsError:
            raise UserError(
                f"another process publishes weights as {self.name!r}; choose another name, or end it"
            ) from None


class PinnedWeights:
    """A version in use: nobody writes to its memory until `release`.

    Attributes:
        published: which version it is.
        tensors: by name, views of the shared memory; not to be read after `release`.
    """

    def __init__(self, reader: WeightReader, buffer: int, published: Published) -> None:
        self.published = published
        self.tensors: Mapping[str, Tensor] = reader.segment.tensors(buffer)
        self._reader, self._buffer = reader, buffer
        self._released = False

    @property
    def version(self) -> int:
        return self.published.version

    @property
    def weights_id(self) -> str:
        return self.published.weights_id

    def release(self) -> None:
        """Give the memory back to the publisher. Idempotent."""
        if not self._released:
            self._released = True
            self._reader._unpin(self._buffer)


class WeightReader:
    """A process's access to weights that another one publishes.

    Args:
        name: of the store.
        reader: what errors of the publisher call this reader.

    Raises:
        UserError: there is no such store, or it has too many readers.
        SharedMemoryError: its header is damaged.
    """

    def __init__(self, name: str, reader: str = "") -> None:
        self.name = name
        try:
            self.segment = Segment.open(segment_path(name))
        except FileNotFoundError:
            raise UserError(
                f"nobody publishes weights as {name!r} on this machine; start that process first"
            ) from None
        self._pins = [0, 0]
        self._guard = threading.Lock()
        found = (i for i in range(READERS) if try_lock(self.segment.file, reader_byte(i), exclusive=True))
        entry = next(found, None)
        if entry is None:
            self.segment.close()
            raise UserError(f"weights {name!r} have {READERS} readers already, which is the most")
        self._entry = entry
        self.segment.set_reader_name(entry, f"process {os.getpid()} {reader}".strip())

    @property
    def publisher_alive(self) -> bool:
        """Whether a process holds the right to publish."""
        return self.segment.held(PUBLISHER)

    def check(self, module: nn.Module) -> None:
        """Raise a `UserError` unless the weights are those of a model like `module`."""
        if change := difference(layout_of(module.state_dict()), self.segment.layout):
            raise UserError(f"weights {self.name!r} belong to another model: {change}")

    def newest(self) -> Published | None:
        """The newest version, at the cost of a few system calls; None before the first publish.

        Raises:
            SharedMemoryError: the segment was removed, replaced or damaged.
        """
        self.segment.check()
        found = self.segment.newest()
        return found[1] if found else None

    def pin(self, timeout_s: float = 60.0) -> PinnedWeights:
        """Pin the newest version and check its content, which reads all of it once.

        Raises:
            LineStuckError: nothing was published in time.
            SharedMemoryError: the segment or the content is damaged; nothing is pinned.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.segment.check()
            found = self.segment.newest()
            if found is not None and (pinned := self._try_pin(*found)) is not None:
                return pinned
            if time.monotonic() >= deadline:
                raise LineStuckError(
                    f"no version of weights {self.name!r} was published within {timeout_s:g} s"
                )
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Release every pin and detach."""
        self.segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_pin(self, buffer: int, published: Published) -> PinnedWeights | None:
        """None if the publisher was faster and writes there already."""
        with self._guard:
            if not self._pins[buffer] and not try_lock(
                self.segment.file, pin_byte(buffer, self._entry), exclusive=True
            ):
                return None
            self._pins[buffer] += 1
        try:
            if self.segment.descriptor(buffer) == published:
                content = fingerprint(self.segment.memory(buffer))
                if content != published.fingerprint:
                    raise SharedMemoryError(
                        f"version {published.version} of weights {self.name!r} is damaged: its content has the "
                        f"fingerprint {content[:8]}…, published was {published.fingerprint[:8]}…"
                    )
                return PinnedWeights(self, buffer, published)
        except BaseException:
            self._unpin(buffer)
            raise
        self._unpin(buffer)
        return None

    def _unpin(self, buffer: int) -> None:
        with self._guard:
            self._pins[buffer] -= 1
            if not self._pins[buffer] and self.segment.file >= 0:
                unlock(self.segment.file, pin_byte(buffer, self._entry))


def remove_abandoned() -> list[str]:
    """Remove stores that no living process publishes or reads; returns their names."""
    removed = []
    for name in segment_names():
        try:
            segment = Segment.open(segment_path(name))
        except (OSError, SharedMemoryError, UserError):
            continue
        # The lock keeps others from taking it over meanwhile.
        mine = try_lock(segment.file, PUBLISHER, exclusive=True)
        if mine and segment.in_place and not any(segment.held(reader_byte(i)) for i in range(READERS)):
            segment.remove()
            removed.append(name)
        segment.close()
    return removed
