"""Writes `docs/settings.md` from the pydantic models: `.venv/bin/python docs/reference.py`."""

from __future__ import annotations

import types
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config import Config

PAGE = Path(__file__).with_name("settings.md")

INTRODUCTION = """# Settings

This page is generated from `src/headrace/config.py` by `docs/reference.py`.

A run is described by one TOML file; `--set section.key=value` changes single settings. An unknown key, a wrong
type or an impossible value is an error before any work. Relative paths (in `--set` too) are relative to the file.
"""


def settings_page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        about = (section.__doc__ or "").strip().split(": ", 1)[-1].rstrip(".")
        parts.append(f"## `[{name}]`\n\n{about[0].upper()}{about[1:]}.\n")
        parts.append("| setting | type | default | what it does |\n| --- | --- | --- | --- |")
        parts.extend(_row(key, entry) for key, entry in section.model_fields.items())
        parts.append("")
    return "\n".join(parts)


def _row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field)
    about = (field.description or "").replace("|", "\\|")
    return f"| `{key}` | {_type(field)} | {default} | {about} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "automatic"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _type(field: FieldInfo) -> str:
    names = {int: "integer", float: "number", str: "string", bool: "true or false"}

    def describe(annotation: object) -> str:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Literal:
            return " or ".join(f'`"{value}"`' for value in arguments)
        if origin in (typing.Union, types.UnionType):
            return " or ".join(describe(a) for a in arguments if a is not type(None))
        if origin is list:
            return f"list of {describe(arguments[0])}s"
        if origin is tuple:
            return f"{len(arguments)} {describe(arguments[0])}s"
        if origin is dict:
            return "table"
        return names.get(annotation, getattr(annotation, "__name__", str(annotation)))  # type: ignore[call-overload]

    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if hasattr(item, name)
    ]
    return describe(field.annotation) + (f", {', '.join(bounds)}" if bounds else "")


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
