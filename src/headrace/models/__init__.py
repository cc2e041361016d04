"""Models: from a name to loaded weights, chat templates, and the parts of inference that depend on the model.

Invariant: importing this package imports no torch. Finding a model needs none; every other name below loads
its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.models.folder import parameter_count
from headrace.models.resolve import aliases, cache_folder, cached_models, resolve

if TYPE_CHECKING:
    from headrace.models.chat import (
        IncrementalDetokenizer,
        decode_completion,
        encode_prompt,
        encode_task_prompt,
    )
    from headrace.models.conversation import Conversation, Extension
    from headrace.models.load import LoadedModel, kv_bytes_per_token, load_model

_LAZY = {
    "IncrementalDetokenizer": "chat",
    "decode_completion": "chat",
    "encode_prompt": "chat",
    "encode_task_prompt": "chat",
    "Conversation": "conversation",
    "Extension": "conversation",
    "LoadedModel": "load",
    "kv_bytes_per_token": "load",
    "load_model": "load",
}

__all__ = [
    "Conversation",
    "Extension",
    "IncrementalDetokenizer",
    "LoadedModel",
    "aliases",
    "cache_folder",
    "cached_models",
    "decode_completion",
    "encode_prompt",
    "encode_task_prompt",
    "kv_bytes_per_token",
    "load_model",
    "parameter_count",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
