"""How fast this machine reads memory and multiplies matrices, as far as torch gets it to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# More than any cache holds, and little enough for a small machine.
READ_BYTES = 1 << 29
COLUMNS = 4096
MATRIX_SIZE = 2048
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """bytes_per_second: of a streaming read. flops: per second, of a large product of matrices in one dtype."""

    bytes_per_second: float
    flops: float

    def best(self, other: MachineLimits) -> MachineLimits:
        """The larger of each: what disturbs a measurement only ever makes it smaller."""
        return MachineLimits(
            bytes_per_second=max(self.bytes_per_second, other.bytes_per_second), flops=max(self.flops, other.flops)
        )


def measure_limits(
    device: torch.device, dtype: torch.dtype, *, read_bytes: int = READ_BYTES, matrix_size: int = MATRIX_SIZE
) -> MachineLimits:
    """The best of a few attempts, a second or two in all, on the threads torch is set to.

    Args:
        read_bytes: size of what is read. matrix_size: rows and columns of what is multiplied.
    """
    return MachineLimits(
        bytes_per_second=_bytes_per_second(device, read_bytes), flops=_flops(device, dtype, matrix_size)
    )


def _bytes_per_second(device: torch.device, num_bytes: int) -> float:
    # Torch's product with a vector reads a matrix faster than its sums do.
    matrix = torch.ones(num_bytes // (4 * COLUMNS), COLUMNS, dtype=torch.float32, device=device)
    vector = torch.ones(COLUMNS, dtype=torch.float32, device=device)
    return matrix.nbytes / _least_seconds(device, lambda: matrix @ vector)


def _flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = torch.randn(2, size, size, device=device).to(dtype).unbind()
    return 2 * size**3 / _least_seconds(device, lambda: left @ right)


def _least_seconds(device: torch.device, work: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(ATTEMPTS + 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    # The first also finds memory and threads.
    return min(times[1:])
