"""An adapter that is being trained: its parameters, and the patch they make at this moment."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graftlm.adapters.methods.lora import compile_lora
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.errors import AdapterUnsupported
from graftlm.layers.patch import ModelPatch
from graftlm.models.base_weights import BaseWeights
from graftlm.training.dropout import Dropout
from graftlm.training.parts.biases import BiasPart
from graftlm.training.parts.expert_stacks import ExpertStackPart
from graftlm.training.parts.low_rank import LowRankPart
from graftlm.training.parts.part import ParameterKey, TrainablePart
from graftlm.training.parts.token_rows import TokenRowsPart
from graftlm.training.parts.whole_modules import WholeModulesPart
from graftlm.training.start import Start


class TrainableAdapter:
    """Low-rank updates, and what else a LoRA may hold: whole modules, biases, rows of tokens.

    parameters: tensors under the names PEFT saves them by, in float32 (float64 over a float64 base) whatever the base
    is held in: bfloat16 is too coarse to add a learning rate's worth to.

    Raises:
        AdapterError: the tensors to start from do not fit the base, or what is asked for could not be served together.
    """

    def __init__(self, start: Start, base: BaseWeights, *, seed: int) -> None:
        self._base = base
        self._parts: tuple[TrainablePart, ...] = (
            LowRankPart(start.config, start.targets, base),
            ExpertStackPart(start.config, start.stacks, base),
            WholeModulesPart(start.saved, base),
            BiasPart(start.config, start.targets, start.saved, base),
            TokenRowsPart(start.token_ids, base, reaches_head=start.rows_reach_head),
        )
        dtype = torch.promote_types(base.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        values = {key: value for part in self._parts for key, value in part.fresh(generator).items()}
        if start.tensors is not None:
            values = self._given(start.tensors, values)
        self._values = {
            key: value.detach().to(base.device, dtype, copy=True).contiguous().requires_grad_()
            for key, value in values.items()
        }
        self.parameters: dict[str, Tensor] = {key.name: value for key, value in self._values.items()}
        self._check_loads(start)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def num_modules(self) -> int:
        return len({key.path for key in self._values})

    def patch(self, dropout: Dropout | None = None) -> ModelPatch:
        """What the adapter does now, differentiable in the parameters.

        Args:
            dropout: of the pass the patch is for; None for an adapter that sees all.
        """
        builder = PatchBuilder(self._base)
        for part in self._parts:
            part.add_to(builder, self._values, dropout)
        return builder.build_on_demand()

    def _given(self, tensors: Mapping[str, Tensor], fresh: Mapping[ParameterKey, Tensor]) -> dict[ParameterKey, Tensor]:
        found = ModuleTensors(tensors, self._base.sites)
        values: dict[ParameterKey, Tensor] = {}
        for key, value in fresh.items():
            tensor = found.require(*key)
            check_shape(f"{key.role} of {key.path}", tensor, tuple(value.shape))
            values[key] = tensor
        self._take_copies(found)
        found.check_all_taken()
        return values

    def _take_copies(self, found: ModuleTensors) -> None:
        """PEFT saves the base's own matrix beside an adapter on it."""
        sites = self._base.sites
        for end in (sites.embedding_path, sites.head_path):
            for role in ("weight", "base_layer.weight"):
                if (copy := found.take(end, role)) is None:
                    continue
                own = self._base.embedding() if end == sites.embedding_path else self._base.linear(end).dequantize()
                if copy.shape != own.shape or not torch.equal(copy.to(own), own):
                    raise AdapterUnsupported(
                        f"init_adapter brings a matrix of its own for {end}, which would stay as it is",
                        do=f"train it too, with {end.rpartition('.')[2]} among modules_to_save, or start from the base",
                    )

    def _check_loads(self, start: Start) -> None:
        """What is trained must be what can be served: the folder that would be written now is read as any other."""
        tensors = ModuleTensors({name: value.detach() for name, value in self.parameters.items()}, self._base.sites)
        compile_lora(start.raw, tensors, self._base)
        tensors.check_all_taken()
