"""An engine that follows the weights which another process publishes.

A new version is packed in the background, on one thread, while the engine decodes on the old one; between two steps
the engine then switches by changing pointers. Parameters are views of the shared memory.

Invariants
* Weights change only inside `poll` and `wait`, so between two steps.
* The version that the engine uses stays pinned until the switch away from it. Its pin is given up in the background
  too, once the module's parameters show the new one.
* At most two versions are pinned and at most two packed.
* A version that is damaged is never used: the engine goes on with the one it has, `refused` counts it, and a warning
  says so once.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

import torch

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.forward import Forward, Prepared
from headrace.errors import HeadraceError, LineStuckError, UserError
from headrace.models import LoadedModel
from headrace.models.packing import assign
from headrace.state.shared_memory import Published
from headrace.state.weights import PinnedWeights, WeightReader

logger = logging.getLogger("headrace.engine")

_POLL_S = 0.001


class Follower(Protocol):
    """What can follow weights: an `Engine`, or a `Prefiller`."""

    forward: Forward
    version: int

    @property
    def weights_id(self) -> str: ...

    def update_weights(self, version: int, weights_id: str, prepared: Prepared | None = None) -> None: ...


class WeightFollower:
    """Keeps `engine` on the newest version of a store.

    Call `poll` between steps. Where several threads compute, one fewer than there are cores leaves one for packing.

    Args:
        engine: built over the weights of `pinned`, see `attach`.
        pinned: the version that it uses now.
        max_pack_s: the longest that packing a version may take; past it `poll` raises.

    Attributes:
        last_switch_s: how long the last switch stopped decoding, in seconds.
        last_pack_s: how long the last version was checked and packed, in the background.
        switches, refused: versions that were taken and that were not.
    """

    def __init__(
        self, engine: Follower, reader: WeightReader, pinned: PinnedWeights, *, max_pack_s: float = 120.0
    ) -> None:
        self.engine, self.reader, self.max_pack_s = engine, reader, max_pack_s
        self.last_switch_s = 0.0
        self.last_pack_s = 0.0
        self.switches = 0
        self.refused = 0
        self._pinned = pinned
        self._seen: Published = pinned.published
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="headrace-packing")
        self._packing: Future[tuple[PinnedWeights, Prepared, float]] | None = None
        self._packing_since = 0.0
        self._leaving: Future[None] | None = None
        self._complaint = ""

    @property
    def packing(self) -> bool:
        """Whether a newer version is on its way."""
        return self._packing is not None

    def poll(self) -> bool:
        """Notice a newer version, or switch to it once it is packed. Never waits. Returns whether it switched.

        Raises:
            LineStuckError: packing takes longer than `max_pack_s`.
        """
        if self._leaving is not None and self._leaving.done():
            leaving, self._leaving = self._leaving, None
            leaving.result()
        if self._packing is None:
            self._look()
            return False
        if not self._packing.done():
            if time.monotonic() - self._packing_since > self.max_pack_s:
                raise LineStuckError(f"packing new weights has taken more than {self.max_pack_s:g} s")
            return False
        future, self._packing = self._packing, None
        try:
            pinned, prepared, self.last_pack_s = future.result()
        except (HeadraceError, OSError) as error:
            self._refuse(error)
            return False
        started = time.perf_counter()
        self.engine.update_weights(pinned.version, pinned.weights_id, prepared)
        self._leaving = self._packer.submit(self._leave, self._pinned, prepared)
        self._pinned = pinned
        self.last_switch_s = time.perf_counter() - started
        self.switches += 1
        self._complaint = ""
        return True

    def wait(self, version: int, timeout_s: float) -> None:
        """Poll until the engine uses `version` or a later one, and the module's parameters show it.

        Raises:
            LineStuckError: it does not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while self.engine.version < version or self._leaving is not None:
            if time.monotonic() >= deadline:
                raise LineStuckError(
                    f"weights version {version} of {self.reader.name!r} did not come within {timeout_s:g} s; "
                    f"the newest here is {self.engine.version}, and {self.refused} were refused"
                )
            if not self.poll():
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop following; pins are released. The engine must not be used any more."""
        self._packer.shutdown(wait=True, cancel_futures=True)
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self) -> None:
        try:
            newest = self.reader.newest()
        except (HeadraceError, OSError) as error:
            self._refuse(error)
            return
        # While a version that nobody used is withdrawn for a newer one, the one in use is the newest again.
        if newest is not None and newest not in (self._seen, self._pinned.published):
            self._seen = newest
            self._packing_since = time.monotonic()
            self._packing = self._packer.submit(self._pack)

    def _refuse(self, error: Exception) -> None:
        """Count and report it once, however often it is met."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            self.refused += 1
            logger.warning("new weights are refused, version %d stays: %s", self.engine.version, error)

    def _pack(self) -> tuple[PinnedWeights, Prepared, float]:
        """In the packing thread."""
        started = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            pinned = self.reader.pin()
            try:
                # It may be newer than what was seen.
                self._seen = pinned.published
                return pinned, self.engine.forward.prepare(pinned.tensors), time.perf_counter() - started
            except BaseException:
                pinned.release()
                raise
        finally:
            # For threads that start later: PyTorch gives them what was set last.
            torch.set_num_threads(threads)

    def _leave(self, old: PinnedWeights, prepared: Prepared) -> None:
        """In the packing thread: hundreds of tensors are touched here that decoding need not wait for."""
        self.engine.forward.show(prepared)
        old.release()


def attach(model: LoadedModel, reader: WeightReader, timeout_s: float = 60.0) -> PinnedWeights:
    """Let the parameters of `model` show the newest published weights.

    Args:
        timeout_s: the longest wait for a first version.

    Raises:
        UserError: the weights are another model's, or the model is not on the CPU.
        LineStuckError: nothing was published in time.
        SharedMemoryError: what is there is damaged.
    """
    if model.device.type != "cpu":
        raise UserError(f'weights in shared memory need model.device = "cpu", not "{model.device.type}"')
    reader.check(model.module)
    pinned = reader.pin(timeout_s)
    assign(model.module.state_dict(keep_vars=True), pinned.tensors)
    return pinned


def follow(
    model: LoadedModel, store: str, config: EngineConfig | None = None, *, reader: str = "", **options: Any
) -> WeightFollower:
    """A new engine that follows a store: `.engine` generates, `.poll()` between steps keeps it current.

    Args:
        model: of the same architecture; its own weights are given up.
        store: the name given to `WeightStore`.
        reader: what the publisher's errors call this engine.
        options: of `Engine` beyond its settings.

    Raises:
        As `attach` and `Engine`.
    """
    opened = WeightReader(store, reader)
    try:
        pinned = attach(model, opened)
        engine = Engine(model, config, pinned.weights_id, **options)
        engine.version = pinned.version
        return WeightFollower(engine, opened, pinned)
    except BaseException:
        opened.close()
        raise
