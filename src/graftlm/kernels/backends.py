"""Which sets of kernels there are, which is used, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graftlm.kernels.cpu.library import best_library
from graftlm.kernels.registry import choose_kernels


@dataclass(frozen=True, kw_only=True)
class Backend:
    """reason: why it is not the one in use; None for the one that is."""

    name: str
    reason: str | None


def backends(device: torch.device) -> tuple[Backend, ...]:
    """What a model on this device computes with comes first."""
    chosen = Backend(name=choose_kernels(device, deterministic=False).name, reason=None)
    available = best_library()
    if device.type != "cpu" or not available.reason:
        return (chosen,)
    return (chosen, Backend(name="faster C++ kernels", reason=available.reason))
