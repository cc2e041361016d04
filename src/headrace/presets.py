"""Which settings of `[algorithm]` each built-in algorithm reads, and what it sets them to by itself.

Invariants
* A setting that stands in an algorithm's entry is read by it, and one that does not is not.
* This module imports nothing, so that settings can be checked without torch.
"""

from __future__ import annotations

from typing import Any

Presets = dict[str, Any]

COMMON: Presets = {
    "group_size": 8,
    "loss_aggregation": "token",
    "max_length": None,
    "kl_coef": 0.0,
    "zero_advantage": "count",
    "mask_truncated": False,
}
"""What the line and the trainer read for every algorithm, one of the user's own too."""

_CLIPPED: Presets = COMMON | {
    "normalize_std": True,
    "ratio": "behaviour",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "importance_cap": 2.0,
}
"""The clipped surrogate's."""

PRESETS: dict[str, Presets] = {
    "grpo": _CLIPPED,
    "dr_grpo": _CLIPPED | {"normalize_std": False, "clip_high": 0.2, "loss_aggregation": "constant"},
    "dapo": _CLIPPED | {"zero_advantage": "replace"},
    "gspo": COMMON
    | {
        "normalize_std": True,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "loss_aggregation": "sequence",
    },
    "rloo": COMMON | {"importance_cap": 2.0},
    # A group cannot be known to teach nothing before the batch is complete, so none is replaced.
    "reinforce": {key: value for key, value in COMMON.items() if key != "zero_advantage"}
    | {"normalize_std": True, "importance_cap": 2.0},
    "cispo": COMMON | {"normalize_std": True, "clip_high": 4.0},
    "icepop": COMMON | {"normalize_std": True, "ratio_band": 2.0, "loss_aggregation": "sequence"},
    "dsis": COMMON | {"normalize_std": True, "clip_low": 0.2, "clip_high": 0.28},
}
"""By `algorithm.name`; docs/algorithms.md says where the values come from."""

BATCH_SCOPE = ("reinforce",)
"""Those whose advantages need the whole batch; a group of one has an advantage there too."""

CORRECTING = ("rloo", "reinforce", "cispo", "icepop", "dsis")
"""Those whose loss corrects, token by token, for rollouts of another policy; where `ratio` is read, "proximal" does."""


def unread(name: str, given: set[str]) -> list[str]:
    """Those of the settings `given` that the built-in algorithm `name` does not read, in order."""
    return sorted(given - {"name", *PRESETS[name]})
