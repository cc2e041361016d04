"""Text as a stream can print it: what a model says or an error quotes need not be text that can be encoded."""

from __future__ import annotations

from typing import IO


def printable(text: str, stream: IO[str]) -> str:
    """`text` with every character that `stream` cannot encode written as its escape (`\\ud800`)."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
