"""Which implementation an operation runs is a matter of the calling thread and of nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.registry import REFERENCE, using


def zeros(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_zeros(len(x), len(weight))


ZEROS = replace(REFERENCE, name="zeros", linear=zeros)
X, WEIGHT = torch.ones(2, 3), torch.ones(4, 3)


def test_kernels_are_used_inside_their_scope_only() -> None:
    before = ops.linear(X, WEIGHT)
    with using(ZEROS):
        inside = ops.linear(X, WEIGHT)
    assert torch.equal(before, torch.full((2, 4), 3.0))
    assert torch.equal(inside, torch.zeros(2, 4))
    assert torch.equal(ops.linear(X, WEIGHT), before)


def test_an_error_inside_the_scope_ends_it() -> None:
    with pytest.raises(RuntimeError), using(ZEROS):
        raise RuntimeError
    assert torch.equal(ops.linear(X, WEIGHT), torch.full((2, 4), 3.0))


def test_threads_use_different_kernels_at_once() -> None:
    inside = Barrier(2)

    def compute(kernels: Kernels) -> Tensor:
        with using(kernels):
            inside.wait()
            result = ops.linear(X, WEIGHT)
            inside.wait()
            return result

    with ThreadPoolExecutor(2) as threads:
        reference, other = threads.map(compute, (REFERENCE, ZEROS))
    assert torch.equal(reference, torch.full((2, 4), 3.0))
    assert torch.equal(other, torch.zeros(2, 4))
