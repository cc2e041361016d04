"""What an engine keeps of KV beyond its running sequences: the directory that its settings ask for.

Invariants
* The identity says everything that KV depends on. An engine that shares KV with other processes or runs never goes by a
  name that others may use for other weights: weights without one are named by their content.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.engine.forward import Forward
from headrace.engine.slots import KVSlots
from headrace.errors import UserError
from headrace.files import cache_folder
from headrace.kernels.copying import BlockLayout
from headrace.models import LoadedModel
from headrace.state.directory import Directory
from headrace.state.eviction import make_policy
from headrace.state.kv import KVIdentity
from headrace.state.tiers.disk import DiskTier
from headrace.state.tiers.shared import SharedTier
from headrace.state.weights import content_digest

BLOCK_TOKENS = 16
"""Tokens of a block, the same for everybody who shares KV."""

UNNAMED = "loaded"
"""The identity of weights that nobody named."""


def make_directory(
    config: EngineConfig,
    model: LoadedModel,
    forward: Forward,
    slots: KVSlots,
    weights_id: str,
    shared_name: str | None,
) -> Directory:
    """The device's prefix cache, and the lower tiers that the settings switch on.

    Args:
        shared_name: engines in other processes with the same name share the host tier; by default nobody does.
    """
    layout = BlockLayout.of(slots.rows(0))
    policy = make_policy(config.kv_evict)
    host = disk = None
    if config.kv_host_mb:
        host = SharedTier(
            shared_name or f"{os.getpid()}-{uuid.uuid4().hex[:8]}",
            config.kv_host_mb * 2**20,
            layout.row_bytes * BLOCK_TOKENS,
            BLOCK_TOKENS,
            policy=policy,
        )
        if host.segment is None:
            raise UserError(f"engine.kv_host_mb = {config.kv_host_mb}: {host.note}; lower it, or set it to 0")
    if config.kv_disk_mb:
        folder = Path(config.kv_disk_folder) if config.kv_disk_folder else disk_folder()
        disk = DiskTier(folder, config.kv_disk_mb * 2**20, policy=policy)
        if disk.unusable:
            if host is not None:
                host.close()
            raise UserError(
                f"engine.kv_disk_mb needs a folder to write to: {disk.note}; set engine.kv_disk_folder"
            )
    if (host or disk) and weights_id == UNNAMED:
        weights_id = content_digest(model.module)
    directory = Directory(
        config.prefix_cache_mb * 2**20,
        layout,
        block_size=BLOCK_TOKENS,
        host=host,
        disk=disk,
        policy=policy,
        copies_equal_memory=model.device.type == "cpu",
    )
    directory.identity = identity_of(config, model, forward, slots, weights_id, shared=bool(host or disk))
    return directory


def identity_of(
    config: EngineConfig,
    model: LoadedModel,
    forward: Forward,
    slots: KVSlots,
    weights_id: str,
    *,
    shared: bool,
) -> KVIdentity:
    """What the engine's KV belongs to."""
    int8 = config.weight_format == "int8"
    layout = f"slot-rows {_name(slots.dtype)}"
    if shared:
        # What else numbers depend on: how they are computed, and the parts of a model that are no weights.
        text = model.module.config.to_json_string(use_diff=False)
        layout += f" {type(forward).__name__} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return KVIdentity(weights_id, "int8" if int8 else _name(model.dtype), "", layout)


def disk_folder() -> Path:
    """Where the disk tier lies when nobody says otherwise: it is shared by all runs."""
    return cache_folder() / "kv"


def shared_name_of(run: Path) -> str:
    """The name of the host tier of a run's engines."""
    where = hashlib.blake2b(str(Path(run).resolve()).encode(), digest_size=8).hexdigest()
    return f"{os.getuid()}-{where}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
