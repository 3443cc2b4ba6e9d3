"""What any method may save beside its own tensors: whole modules, resized vocabularies, and biases.

Source: peft/utils/save_and_load.py, peft/utils/other.py (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import TargetConfig
from graftlm.adapters.targets import is_saved
from graftlm.errors import AdapterCorrupt, AdapterIncompatible, AdapterUnsupported
from graftlm.layers.transforms import Affine
from graftlm.models.base_weights import BaseWeights

WEIGHT_ROLES = ("base_layer.weight", "token_adapter.base_layer.weight")
BIAS_ROLES = ("bias", "base_layer.bias", "token_adapter.base_layer.bias")
# Before training: copies of the modules whose trained form is saved too.
ORIGINAL_ROLES = ("original_module.weight", "original_module.bias")


class SavedModules:
    """Takes them from `tensors` and tells every builder. What remains of the base is then read from here.

    vocab_size: tokens the adapter knows, if they are not the base's.
    """

    def __init__(
        self, config: TargetConfig, tensors: ModuleTensors, base: BaseWeights, builders: Sequence[PatchBuilder]
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._base = base
        self._sites = base.sites
        self._builders = builders
        self._replaced: dict[str, Tensor] = {}
        self.vocab_size: int | None = None

    def replace_modules(self) -> None:
        """`modules_to_save`, vocabularies resized before training, and copies of the base's own matrices."""
        for role in ORIGINAL_ROLES:
            self._tensors.drop(role)
        weights: dict[str, Tensor] = {}
        for module in self._tensors.modules_with("weight", "modules_to_save.weight", *WEIGHT_ROLES):
            saved = is_saved(self._config, module)
            roles = list(WEIGHT_ROLES)
            if saved or module in self._ends:
                roles.insert(0, "weight")
            # ensure_weight_tying saves both ends, and names one of them.
            tied = self._sites.tied_head and module in self._ends
            if saved or (tied and any(is_saved(self._config, end) for end in self._ends)):
                roles.insert(0, "modules_to_save.weight")
            found = [weight for role in roles if (weight := self._tensors.take(module, role)) is not None]
            if found:
                self._replace(module, found[0])
                weights[module] = found[0]
        self._check_all_saved(weights)
        if self._sites.tied_head:
            self._check_one_matrix(weights)
            self._replace_other_end(weights)
        self.vocab_size = self._settle_vocabulary(weights)

    def replace_biases(self) -> None:
        """`bias="all"` and its like save absolute values that take the place of the base's; beside a head that is
        adapted, PEFT saves its bias whatever the config says."""
        for module in self._tensors.modules_with(*BIAS_ROLES):
            if self._config.bias == "none" and module not in self._ends:
                continue
            current = self._bias(module)
            saved = self._take_bias(module)
            if saved is None or current is None:
                raise AdapterIncompatible(f"{module} has no bias in this base, but the adapter brings one")
            check_shape(f"bias of {module}", saved, tuple(current.shape))
            saved, current = self.on_device(saved).float(), current.float()
            if torch.equal(saved, current):
                continue
            for builder in self._builders:
                if module in self._sites.norms:
                    builder.replace_norm(module, self._base.norm(module)[0], saved)
                else:
                    builder.transform_output(module, Affine(shift=saved - current))
                builder.describe(module, "bias")

    def is_replaced(self, module: str) -> bool:
        """Whether the adapter brings a matrix of its own for a module."""
        return module in self._replaced

    def weight(self, module: str) -> Tensor:
        """A linear module's matrix as this adapter has it, [out, in] float32."""
        replaced = self._replaced.get(module)
        matrix = self._base.linear(module).dequantize() if replaced is None else replaced
        return matrix.to(self._base.device).float()

    def shape(self, module: str) -> tuple[int, int]:
        """(out, in) of that matrix."""
        replaced = self._replaced.get(module)
        if replaced is not None:
            return replaced.shape[0], replaced.shape[1]
        site = self._sites.matrices[module]
        return site.out_features, site.in_features

    def on_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the adapter, where the base is."""
        return tensor.to(self._base.device)

    def embedding(self) -> Tensor:
        """The embedding table as this adapter has it, [V', E] float32."""
        replaced = self._replaced.get(self._sites.embedding_path)
        return (self._base.embedding() if replaced is None else replaced).to(self._base.device).float()

    def _replace(self, module: str, weight: Tensor) -> None:
        if module in self._sites.norms:
            check_shape(module, weight, (self._sites.norms[module].size,))
            bias = self._saved_bias(module, self._base.norm(module)[1])
            for builder in self._builders:
                builder.replace_norm(module, weight, bias)
                builder.describe(module, "replaced")
            return
        if module in self._sites.other_paths:
            raise AdapterUnsupported(f"{module} is saved whole, but only linear layers, norms and token tables can be")
        if module in self._sites.matrices and self._sites.matrices[module].transposed:
            weight = weight.t()
        current = self._base.embedding() if module == self._sites.embedding_path else self.weight(module)
        rows = weight.shape[0] if module in self._ends and weight.dim() == 2 else current.shape[0]
        check_shape(module, weight, (rows, current.shape[1]))
        bias = self._bias(module)
        if is_saved(self._config, module):
            bias = self._saved_bias(module, bias)
        elif weight.shape == current.shape and torch.equal(weight.to(current), current):
            return  # a copy of the base: PEFT saves one beside every adapter on embedding or head
        elif bias is not None and rows != len(bias):
            bias = self._resized_bias(module, bias, rows)
        self._replaced[module] = weight
        for builder in self._builders:
            if module == self._sites.embedding_path:
                builder.replace_table(weight)
            else:
                builder.replace_linear(module, weight, bias)
            builder.describe(module, "replaced")

    @property
    def _ends(self) -> tuple[str, str]:
        """The modules with a row per token."""
        return self._sites.embedding_path, self._sites.head_path

    def _bias(self, module: str) -> Tensor | None:
        """A module's bias as the base has it."""
        if module in self._sites.norms:
            return self._base.norm(module)[1]
        return self._base.bias(module) if module in self._sites.matrices else None

    def _take_bias(self, module: str) -> Tensor | None:
        found = [bias for role in BIAS_ROLES if (bias := self._tensors.take(module, role)) is not None]
        return found[-1] if found else None

    def _resized_bias(self, module: str, current: Tensor, rows: int) -> Tensor:
        """The bias of a head with another vocabulary."""
        saved = self._take_bias(module)
        if saved is None and rows > len(current):
            raise AdapterCorrupt(f"{module} has {rows} rows, but its bias is missing")
        bias = current[:rows] if saved is None else saved
        check_shape(f"bias of {module}", bias, (rows,))
        return bias

    def _saved_bias(self, module: str, current: Tensor | None) -> Tensor | None:
        """The bias of a module that is saved whole: there if and only if the base's module has one."""
        roles = ("modules_to_save.bias", "bias")
        found = [bias for role in roles if (bias := self._tensors.take(module, role)) is not None]
        if current is None and found:
            raise AdapterIncompatible(f"{module} has no bias in this base, but the adapter brings one")
        if current is None:
            return None
        if not found:
            raise AdapterCorrupt(f"bias of {module} is missing, although modules_to_save covers it")
        check_shape(f"bias of {module}", found[0], tuple(current.shape))
        return found[0]

    def _check_all_saved(self, weights: Mapping[str, Tensor]) -> None:
        absent = sorted(
            module for module in self._sites.module_paths if module not in weights and is_saved(self._config, module)
        )
        if absent:
            raise AdapterCorrupt(
                f"modules_to_save covers modules whose weights are missing: {', '.join(absent[:5])}",
                got=f"modules_to_save={list(self._config.modules_to_save)!r}"[:200],
            )

    def _check_one_matrix(self, weights: Mapping[str, Tensor]) -> None:
        """Copies of a tied matrix are equal; modules saved for themselves are, if they are to stay tied."""
        is_one = {end: self._config.ensures_tying or not is_saved(self._config, end) for end in self._ends}
        copies = [weights[end] for end in self._ends if end in weights and is_one[end]]
        if len(copies) == 2 and not torch.equal(*copies):
            raise AdapterCorrupt(
                f"the weights hold two different copies of one tied matrix: {' and '.join(self._ends)}",
                got=f"{list(copies[0].shape)} and {list(copies[1].shape)}",
            )

    def _replace_other_end(self, weights: Mapping[str, Tensor]) -> None:
        """A copy of a tied matrix stands for both ends; a saved module stands for itself alone."""
        for end, other in (self._ends, self._ends[::-1]):
            if end in weights and other not in weights and not is_saved(self._config, end):
                self._replace(other, weights[end])

    def _settle_vocabulary(self, weights: Mapping[str, Tensor]) -> int | None:
        """Tokens that embedding and head both have rows for; None for as many as the base."""
        base_size = self._sites.vocab_size
        embedding, head = (len(self._replaced[end]) if end in self._replaced else base_size for end in self._ends)
        if embedding == head:
            return None if head == base_size else head
        absent = [end for end in self._ends if end not in weights]
        size = min(embedding, head)
        if not absent or size == base_size:
            raise AdapterIncompatible(
                "embedding and head have vocabularies of different size",
                got=f"{embedding} rows of {self._ends[0]}, {head} rows of {self._ends[1]}",
                do="save the adapter with save_embedding_layers=True",
            )
        # PEFT cuts both ends when it shrinks a vocabulary, and saves the one that is adapted.
        self._replace(absent[0], self._cut(absent[0], size))
        return size

    def _cut(self, end: str, size: int) -> Tensor:
        return (self.embedding() if end == self._sites.embedding_path else self.weight(end))[:size]
