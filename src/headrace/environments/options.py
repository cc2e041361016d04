"""Checks of an environment's options, and one-line texts about what user code raised or returned.

Such a text may hold lone surrogates, which UTF-8 cannot encode: a worker escapes them in whatever error it sends.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import EnvironmentSetupError

_MESSAGE_CHARS = 300


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a close match among `known`, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def reject_unknown(options: Mapping[str, Any], known: Iterable[str], owner: str) -> None:
    """Raise EnvironmentSetupError for the first option that `owner` does not know."""
    known = list(known)
    for option in options:
        if option not in known:
            hint = suggest(option, known) or f"; it knows {', '.join(known) if known else 'no options'}"
            raise EnvironmentSetupError(f"unknown environment option {option!r} of {owner}{hint}")


def shortened(text: str, length: int = 80) -> str:
    """`text` cut to at most `length` characters, with an ellipsis where it was cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def describe_exception(error: BaseException, folder: Path | None = None) -> str:
    """`Type: message (file:line)` on one line.

    The place is the innermost frame in a file under `folder` (installed packages aside), or else the
    innermost of all.
    """
    try:
        message = " ".join(str(error).split())
    except Exception:  # an exception of the user's whose text raises itself
        message = "its message cannot be shown"
    message = shortened(message, _MESSAGE_CHARS)
    name = type(error).__name__
    text = f"{name}: {message}" if message else name
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{name}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    frame = next((frame for frame in reversed(frames) if _is_under(frame.filename, folder)), frames[-1])
    return f"{text} ({frame.filename}:{frame.lineno})"


def _is_under(filename: str, folder: Path | None) -> bool:
    path = Path(filename)
    return folder is not None and path.is_relative_to(folder) and "site-packages" not in path.parts
