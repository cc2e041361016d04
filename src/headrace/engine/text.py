"""A completion's text: special tokens, the stop token and the stop string that ended it are left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from headrace.models import decode_completion
from headrace.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stop_token_ids(sampling: Sampling, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The ids that end a turn: the request's own and, unless it ignores them, the model's."""
    ends = () if sampling.ignore_eos else eos_token_ids
    return frozenset((*sampling.stop_token_ids, *ends))


def completion_text(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    finish_reason: str | None,
    sampling: Sampling,
    eos_token_ids: Collection[int],
) -> str:
    """Sampled tokens as text."""
    ids = list(token_ids)
    if ids and finish_reason == "stop" and ids[-1] in stop_token_ids(sampling, eos_token_ids):
        ids.pop()
    return before_stop(decode_completion(tokenizer, ids), sampling.stop)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of these strings."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text
