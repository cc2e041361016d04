"""The documentation is true: the settings page is current, links lead somewhere, examples are valid."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from headrace.config import Config

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    """One of the scripts beside the pages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_is_what_the_models_say() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == script("reference").settings_page(), "run: .venv/bin/python docs/reference.py"


def test_the_performance_page_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page == script("performance").updated(page), "run: .venv/bin/python docs/performance.py"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_examples_are_valid_settings(example: Path) -> None:
    Config.load(example)
