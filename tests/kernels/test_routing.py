"""Routing against transformers' router of Mixtral."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from graftlm.kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_and_experts_are_those_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    routers = {
        True: MixtralTopKRouter(MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2)),
        False: Qwen2MoeTopKRouter(Qwen2MoeConfig(hidden_size=32, num_experts=8, num_experts_per_tok=2)),
    }
    x = torch.randn(50, 32, dtype=dtype)
    for renormalise, router in routers.items():
        with torch.no_grad():
            router.weight.normal_()
            logits, expected, chosen = router.to(dtype)(x)
        weights, experts = ops.route(logits, 2, renormalise=renormalise)
        assert torch.equal(experts, chosen)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.to(expected.dtype), expected)


def test_weights_sum_to_one_only_when_they_are_renormalised() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.5]])
    renormalised, _ = ops.route(logits, 2, renormalise=True)
    plain, _ = ops.route(logits, 2, renormalise=False)
    assert renormalised.sum().item() == pytest.approx(1)
    assert plain.sum().item() < 0.9
