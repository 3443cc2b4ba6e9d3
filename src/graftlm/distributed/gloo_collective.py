"""Ranks that are processes, over torch.distributed's gloo."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftlm.distributed.messages import RankPlace
from graftlm.layers.collective import CollectiveFailed


class GlooCollective:
    """`Collective` of this process; it can be in one.

    Args:
        place: its rendezvous is "host:port" of a `torch.distributed.TCPStore`. address: this machine's, at which the
            others reach this rank. timeout_seconds: how long it waits for them.

    Raises:
        CollectiveFailed: the others do not come.
    """

    def __init__(self, place: RankPlace, *, address: str, timeout_seconds: float) -> None:
        host, _, port = place.rendezvous.rpartition(":")
        timeout = timedelta(seconds=timeout_seconds)
        self.rank = place.rank
        self.size = place.size
        # Gloo listens where the machine's name points to, unless it is told the interface.
        interfaces = [
            name for name, bound in psutil.net_if_addrs().items() if address in {each.address for each in bound}
        ]
        if interfaces:
            os.environ["GLOO_SOCKET_IFNAME"] = interfaces[0]
        try:
            store = TCPStore(host, int(port), None, False, timeout)
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout)
        except RuntimeError as error:
            raise CollectiveFailed(f"the ranks do not meet: {error}") from error

    def all_reduce(self, partial: Tensor) -> Tensor:
        summed = partial.contiguous()
        try:
            dist.all_reduce(summed)
        except RuntimeError as error:
            raise CollectiveFailed(str(error)) from error
        return summed

    def all_gather(self, own: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, own)
        except RuntimeError as error:
            raise CollectiveFailed(str(error)) from error
        return gathered

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
