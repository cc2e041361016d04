"""What weights are: an identity that differs whenever they do.

Version 0 is named by a digest of its content, later versions by a fresh name at each publish, so that "version 5"
of two runs is never taken for the same thing.
"""

from __future__ import annotations

import hashlib
import uuid

import torch
from torch import nn


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
