"""Methods that fold into an additive change of linear layers: what they share, and how the change is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.saved_modules import SavedModules
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import TargetConfig
from graftlm.adapters.targets import check_target, select_targets
from graftlm.errors import AdapterIncompatible, AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """W + lora_b @ lora_a. lora_a: [R, in], lora_b: [out, R], float32."""

    lora_a: Tensor
    lora_b: Tensor


@dataclass(frozen=True, kw_only=True)
class Dense:
    """W + delta. delta: [out, in] float32."""

    delta: Tensor


@dataclass(frozen=True, kw_only=True)
class FoldedLinear:
    """One linear module, for the method that adapts it."""

    path: str
    out_features: int
    in_features: int
    tensors: ModuleTensors
    saved: SavedModules

    def weight(self) -> Tensor:
        """The matrix that is adapted, [out, in] float32."""
        return self.saved.weight(self.path)

    def require(self, role: str, *shape: int | None) -> Tensor:
        """A tensor of the adapter, float32, which then counts as used. shape: None for a length that may be any.

        Raises:
            AdapterCorrupt: it is missing.
            AdapterIncompatible: its shape is another.
        """
        return self.checked(role, self.tensors.require(self.path, role), *shape)

    def take(self, role: str, *shape: int | None) -> Tensor | None:
        """The same, or None when there is none."""
        tensor = self.tensors.take(self.path, role)
        return None if tensor is None else self.checked(role, tensor, *shape)

    def checked(self, role: str, tensor: Tensor, *shape: int | None) -> Tensor:
        """A tensor that was taken, float32.

        Raises:
            AdapterIncompatible: its shape is another.
        """
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise AdapterIncompatible(
                f"{role.removesuffix('.weight')} of {self.path} has another shape than config and base ask for",
                got=list(tensor.shape),
                allowed=str(["any" if wanted is None else wanted for wanted in shape]),
                do="load it over the base it was trained on",
            )
        return self.saved.on_device(tensor).float()


Fold = Callable[[FoldedLinear], LowRank | Dense]


class Folding:
    """One adapter of a method that changes linear layers only.

    adaptable: modules that the method is defined for. targets: those that the adapter's config names. saved: whole
    modules and biases; what they replace is already replaced.
    """

    def __init__(
        self, config: TargetConfig, tensors: ModuleTensors, base: BaseWeights, adaptable: Collection[str]
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._base = base
        self._builder = PatchBuilder(base)
        self.targets = select_targets(config, base.sites, adaptable)
        self.saved = SavedModules(config, tensors, base, [self._builder])
        self.saved.replace_modules()

    def compile(self, method: str, roles: tuple[str, ...], fold: Fold) -> CompiledAdapter:
        """Fold every module that has a tensor of one of `roles`. method: its name, for people.

        Raises:
            AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
        """
        adapted = self._tensors.modules_with(*roles)
        for path in adapted:
            if path not in self._base.sites.linears:
                raise AdapterUnsupported(f"{path or 'the model'} is not a linear layer, but has {', '.join(roles)}")
            check_target(self._config, self._base.sites, self.targets, path)
            out_features, in_features = self.saved.shape(path)
            linear = FoldedLinear(
                path=path,
                out_features=out_features,
                in_features=in_features,
                tensors=self._tensors,
                saved=self.saved,
            )
            self._add(linear, method, fold(linear))
        self.saved.replace_biases()
        if absent := sorted(self.targets - set(adapted)):
            # PEFT leaves such a module at its start, which changes nothing for most methods.
            logger.warning("no tensors for %d targeted modules: %s", len(absent), ", ".join(absent[:5]))
        return CompiledAdapter(method=method, builder=self._builder, vocab_size=self.saved.vocab_size)

    def _add(self, linear: FoldedLinear, method: str, change: LowRank | Dense) -> None:
        """Store the change as factors or as a matrix, whichever is smaller; both are exact in float32."""
        rank = None
        if isinstance(change, LowRank):
            rank = len(change.lora_a)
            if rank * (linear.out_features + linear.in_features) >= linear.out_features * linear.in_features:
                change = Dense(delta=change.lora_b @ change.lora_a)
        if isinstance(change, Dense):
            self._builder.replace_linear(linear.path, linear.weight() + change.delta, self._base.bias(linear.path))
        elif rank:
            self._builder.add_low_rank(linear.path, change.lora_a, change.lora_b)
        self._builder.describe(linear.path, method, rank=rank)
