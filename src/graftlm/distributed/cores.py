"""How many cores each process computes with."""

from __future__ import annotations

import torch

from graftlm.config import EngineConfig


def cores_each(config: EngineConfig) -> int:
    """Of each worker, or of each replica that has none: what the config says, or an equal share of this machine's."""
    return config.worker_cpus or max(1, torch.get_num_threads() // config.num_processes)
