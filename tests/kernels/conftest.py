from __future__ import annotations

from collections.abc import Iterator

import pytest

from graftlm.kernels.cpu.backend import cpu_kernels
from graftlm.kernels.cpu.library import LEVELS, Level, open_library, runnable_levels
from graftlm.kernels.registry import DETERMINISTIC, REFERENCE, Kernels, using


@pytest.fixture(params=[REFERENCE, DETERMINISTIC], ids=lambda kernels: kernels.name)
def implementation(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every implementation does what `ops` says."""
    with using(request.param):
        yield request.param


@pytest.fixture(params=LEVELS, scope="package")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those of one level, or of the portable one where this machine lacks it."""
    level: Level = request.param if request.param in runnable_levels() else "portable"
    return cpu_kernels(open_library(level), REFERENCE)
