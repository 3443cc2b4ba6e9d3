from __future__ import annotations

from collections.abc import Iterator

import pytest

from graftlm.kernels.registry import DETERMINISTIC, REFERENCE, Kernels, using


@pytest.fixture(params=[REFERENCE, DETERMINISTIC], ids=lambda kernels: kernels.name)
def implementation(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every implementation does what `ops` says."""
    with using(request.param):
        yield request.param
