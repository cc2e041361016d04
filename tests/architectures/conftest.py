from __future__ import annotations

import pytest

from architectures import ARCHITECTURES


@pytest.fixture(params=sorted(ARCHITECTURES))
def name(request: pytest.FixtureRequest) -> str:
    """Every architecture of the table in turn."""
    return request.param
