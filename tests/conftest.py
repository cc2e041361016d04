"""What every folder of tests shares."""

import pytest

from headrace import kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of native kernels need the compiler that builds them."""
    reason = kernels.unavailable_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("kernels"):
                item.add_marker(pytest.mark.skip(reason=reason))
