"""LoRA with everything PEFT can save beside it: rsLoRA, DoRA, biases, whole modules, token rows, and initialisations
that change the base.

Sources: arXiv 2106.09685 (LoRA), 2312.03732 (rsLoRA), 2402.09353 (DoRA), 2404.02948 (PiSSA), 2406.01775 (OLoRA),
2412.06071 (KaSA), 2504.12397 (aLoRA); peft/tuners/lora (0.21) for the order of operations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config import LoraConfig, parse_lora_config
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.dora import dora_output, dora_scale
from graftlm.adapters.methods.parameters import check_expert_module, check_plain, select_parameters, take_stacks
from graftlm.adapters.methods.saved_modules import SavedModules
from graftlm.adapters.methods.token_rows import TOKEN_ROWS, token_rows
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.patterns import FULL_NAME, pattern_match
from graftlm.adapters.targets import check_target, select_targets
from graftlm.errors import AdapterCorrupt, AdapterIncompatible, AdapterUnsupported
from graftlm.layers.transforms import Affine
from graftlm.models.base_weights import BaseWeights

logger = logging.getLogger(__name__)

# Saved beside the factors by training methods that are plain LoRA when applied.
TRAINING_ROLES = (
    "lora_velora_embed",
    "lora_monteclora_sampler.expert_weights",
    "lora_monteclora_sampler.expert_weights_prior",
    "lora_monteclora_sampler.gaussian_var_prior",
    "lora_monteclora_sampler.std_prior",
)
# What PEFT takes for an end of a model, whatever it is called in this one: EMBEDDING_LAYER_NAMES.
END_NAMES = ("embed_tokens", "lm_head")


def compile_lora(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type LORA.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_lora_config(raw)
    compiler = _LoraCompiler(config, tensors, base)
    compiler.compile()
    label = ["rsLoRA" if config.use_rslora else "LoRA"]
    label += ["DoRA"] if config.use_dora else []
    label += ["layer replication"] if config.layer_ranges else []
    label += ["aLoRA"] if config.invocation_token_ids else []
    label += [] if config.initialisation == "plain" else [config.initialisation]
    return CompiledAdapter(
        method=" + ".join(label),
        builder=compiler.builder,
        dormant=compiler.dormant,
        invocation_token_ids=config.invocation_token_ids,
        vocab_size=compiler.saved.vocab_size,
    )


class _LoraCompiler:
    """One adapter's tensors, taken module by module."""

    def __init__(self, config: LoraConfig, tensors: ModuleTensors, base: BaseWeights) -> None:
        self._config = config
        self._tensors = tensors
        self._base = base
        self._sites = base.sites
        self._parameters = select_parameters(config, base.sites)
        self._targets = select_targets(config, base.sites, self._adaptable()) | self._parameters.modules
        self._ties_pairs = base.sites.tied_head and _ties_pairs(config)
        if self._ties_pairs:
            self._targets |= {base.sites.embedding_path, base.sites.head_path}
        self._end_pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self.builder = PatchBuilder(base)
        # What an activated LoRA does before its invocation: all but the low-rank part.
        self.dormant = PatchBuilder(base) if config.invocation_token_ids else None
        self.saved = SavedModules(config, tensors, base, self._always)

    def compile(self) -> None:
        for role in TRAINING_ROLES:
            self._tensors.drop(role)
        self.saved.replace_modules()
        self._adapt_expert_stacks()
        adapted = self._adapt_linears() | self._adapt_embedding()
        if self._ties_pairs:
            self._check_tied_pairs()
        self.saved.replace_biases()
        self._replace_token_rows()
        # Names of experts' modules are also those of others; whether experts are adapted, the file alone tells.
        if absent := sorted(self._targets - self._sites.former_linears - adapted):
            # What PEFT does as well: a targeted module whose tensors are missing stays as the base has it.
            logger.warning("no tensors for %d targeted modules: %s", len(absent), ", ".join(absent[:5]))

    def _adaptable(self) -> set[str]:
        # PEFT defines neither for Conv1D.
        is_special = self._config.is_block_diagonal or self._config.initialisation == "kasa"
        linears = self._sites.plain_linears if is_special else self._sites.linears
        return {*linears, *self._sites.former_linears, self._sites.embedding_path}

    @property
    def _always(self) -> list[PatchBuilder]:
        return [self.builder] if self.dormant is None else [self.builder, self.dormant]

    def _adapt_expert_stacks(self) -> None:
        if self._parameters.stacks or self._parameters.modules:
            check_plain(self._config)
        for factors in take_stacks(self._config, self._tensors, self._sites, self._parameters.stacks):
            path = factors.stack.path
            scaling = self._config.scaling_of(path, factors.rank)
            for expert, (lora_a, lora_b) in factors.pairs.items():
                if lora_b.any() and lora_a.any():
                    self.builder.add_low_rank(expert, lora_a, lora_b * scaling)
            self.builder.describe(path, "LoRA", rank=factors.rank, scaling=scaling)

    def _adapt_linears(self) -> set[str]:
        adapted = set()
        for module in self._tensors.modules_with("lora_A.weight", "lora_B.weight"):
            if module not in self._sites.matrices:
                raise AdapterUnsupported(f"{module} is not a linear layer, but has lora_A or lora_B")
            check_target(self._config, self._sites, self._targets, module)
            if module in self._sites.former_linears:
                check_plain(self._config)
            if module in self._sites.expert_modules:
                check_expert_module(self._config, self._sites, module)
            lora_a = self._tensors.require(module, "lora_A.weight").float()
            lora_b = self._tensors.require(module, "lora_B.weight").float()
            self._adapt_linear(module, lora_a, lora_b)
            if module == self._sites.head_path:
                self._end_pairs[module] = lora_a, lora_b
            adapted.add(module)
        return adapted

    def _adapt_linear(self, module: str, lora_a: Tensor, lora_b: Tensor) -> None:
        out_features, in_features = self.saved.shape(module)
        if self._config.is_block_diagonal:
            lora_a, lora_b = _unblock(lora_a, in_features), _unblock(lora_b, lora_a.shape[0])
        rank = self._check_pair(module, lora_a, lora_b, out_features, in_features)
        scaling = self._config.scaling_of(self._pattern_name(module), rank)
        factor_a, factor_b = lora_a, lora_b * scaling
        if self._config.initialisation == "kasa":
            diagonal = self._tensors.require(module, "lora_diag").float()
            check_shape(f"lora_diag of {module}", diagonal, (rank,))
            factor_b = factor_b * diagonal
        if (removed := self._removed_from_base(module, rank, scaling)) is not None:
            left, right = removed
            factor_a, factor_b = torch.cat([factor_a, right]), torch.cat([factor_b, -left], dim=1)
        changes = "LoRA"
        if (magnitude := self._magnitude(module, out_features)) is not None:
            weight = self.saved.weight(module)
            factor_a, factor_b = self._on_device(factor_a), self._on_device(factor_b)
            scale = dora_scale(magnitude, weight, factor_a, factor_b)
            factor_b = factor_b * scale[:, None]
            self.builder.transform_output(module, dora_output(scale, self._base.bias(module)))
            changes = "LoRA, DoRA"
        if self._config.use_lora_bias:
            lora_bias = self._tensors.require(module, "lora_B.bias")
            check_shape(f"lora_B.bias of {module}", lora_bias, (out_features,))
            self.builder.transform_output(module, Affine(shift=self._on_device(lora_bias.float() * scaling)))
        self.builder.add_low_rank(module, factor_a, factor_b)
        self.builder.describe(module, changes, rank=rank, scaling=scaling)

    def _pattern_name(self, module: str) -> str:
        """What rank_pattern and alpha_pattern are compared with."""
        return f"{module}.weight" if module in self._parameters.modules else module

    def _removed_from_base(self, module: str, rank: int, scaling: float) -> tuple[Tensor, Tensor] | None:
        """Factors (L, R) of what PEFT takes out of the base when it loads this adapter: base - L @ R."""
        if self._config.initialisation == "plain" or self.saved.is_replaced(module):
            return None  # a matrix of the adapter's own was saved after the removal
        if module == self._sites.head_path and self._sites.tied_head:
            raise AdapterUnsupported(
                f"init_lora_weights={self._config.initialisation} on a tied head changes the embedding too",
                do="save the adapter with save_embedding_layers=True",
            )
        weight = self.saved.weight(module)
        if self._config.initialisation == "olora":
            if self._sites.linears[module].transposed:
                # PEFT decomposes the matrix as it is stored.
                q, r = torch.linalg.qr(weight.t())
                return r[:rank].t() * scaling, q[:, :rank].t()
            q, r = torch.linalg.qr(weight)
            return q[:, :rank] * scaling, r[:rank]
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        if self._config.initialisation == "pissa":
            return u[:, :rank] * s[:rank], v[:rank]
        return u[:, -rank:] * s[-rank:], v[-rank:]

    def _magnitude(self, module: str, size: int) -> Tensor | None:
        """DoRA's magnitudes, if the config asks for DoRA."""
        if not self._config.use_dora:
            return None
        magnitude = self._tensors.require(module, "lora_magnitude_vector").float().flatten()
        check_shape(f"lora_magnitude_vector of {module}", magnitude, (size,))
        return self._on_device(magnitude)

    def _adapt_embedding(self) -> set[str]:
        path = self._sites.embedding_path
        if path not in self._tensors.modules_with("lora_embedding_A", "lora_embedding_B"):
            return set()
        check_target(self._config, self._sites, self._targets, path)
        lora_a = self._on_device(self._tensors.require(path, "lora_embedding_A").float())
        lora_b = self._on_device(self._tensors.require(path, "lora_embedding_B").float())
        self._end_pairs[path] = lora_b.t(), lora_a.t()
        table = self.saved.embedding()
        rank = self._check_pair(path, lora_a, lora_b, table.shape[1], table.shape[0])
        scaling = self._config.scaling_of(path, rank)
        expand = lora_b.t() * scaling
        scale = None
        if (magnitude := self._magnitude(path, table.shape[1])) is not None:
            scale = dora_scale(magnitude, table.t(), lora_a, expand.t())
        self.builder.add_embedding_low_rank(lora_a.t().contiguous(), expand.contiguous(), scale)
        self.builder.describe(path, "LoRA" if scale is None else "LoRA, DoRA", rank=rank, scaling=scaling)
        return {path}

    def _check_tied_pairs(self) -> None:
        """PEFT gives both ends one pair and saves it twice. Of two that differ it would use the one it reads last."""
        ends = self._sites.embedding_path, self._sites.head_path
        if missing := [end for end in ends if end not in self._end_pairs]:
            raise AdapterCorrupt(
                f"ensure_weight_tying gives {' and '.join(ends)} one pair, but that of {missing[0]} is missing"
            )
        (a, b), (other_a, other_b) = (self._end_pairs[end] for end in ends)
        device = self._base.device
        if not (torch.equal(a.to(device), other_a.to(device)) and torch.equal(b.to(device), other_b.to(device))):
            raise AdapterCorrupt(f"ensure_weight_tying gives {' and '.join(ends)} one pair, but the weights hold two")

    def _replace_token_rows(self) -> None:
        ends = (self._sites.embedding_path, self._sites.head_path)
        found = self._tensors.modules_with(TOKEN_ROWS)
        self._check_token_rows_found(found)
        for module in found:
            if module not in ends:
                raise AdapterUnsupported(f"{module} has token rows, but only {' and '.join(ends)} have tokens for rows")
            values = self._tensors.require(module, TOKEN_ROWS)
            ids = self._token_indices(module)
            check_shape(f"{TOKEN_ROWS} of {module}", values, (len(ids), self._sites.embedding_size))
            self._check_token_rows(module, ids)
            rows = token_rows(ids, values, self._base)
            for builder in self._always:
                if module == self._sites.embedding_path:
                    builder.replace_embedding_rows(rows)
                    builder.describe(module, "token rows")
                if module == self._sites.head_path or self._reaches_head():
                    builder.replace_head_rows(rows)
                    builder.describe(self._sites.head_path, "token rows")

    def _check_token_rows_found(self, found: Sequence[str]) -> None:
        for name in self._config.token_indices:
            named = [module for module in self._sites.module_paths if self._is_token_module(name, module)]
            shared = self._reaches_head() and self._sites.embedding_path in found
            if not any(module in found or (shared and module == self._sites.head_path) for module in named):
                raise AdapterCorrupt(
                    f"{TOKEN_ROWS} of {name or self._sites.embedding_path} is missing",
                    got=f"trainable_token_indices names {len(self._config.token_indices[name])} tokens",
                )

    def _token_indices(self, module: str) -> tuple[int, ...]:
        for name, indices in self._config.token_indices.items():
            if self._is_token_module(name, module) or (module == self._sites.head_path and self._reaches_head()):
                return indices
        raise AdapterCorrupt(f"{module} has token rows that trainable_token_indices does not name")

    def _is_token_module(self, name: str, module: str) -> bool:
        return module.endswith(name) if name else module == self._sites.embedding_path

    def _reaches_head(self) -> bool:
        """On a tied base the rows are replaced at both ends, unless each end has tokens of its own."""
        return self._sites.tied_head and len(set(self._config.token_indices.values())) == 1

    def _check_token_rows(self, module: str, ids: tuple[int, ...]) -> None:
        size = self.saved.vocab_size or self._sites.vocab_size
        if ids and max(ids) >= size:
            raise AdapterIncompatible(f"{module} has a row for token {max(ids)}", allowed=f"tokens below {size}")
        head = self._sites.head_path
        if (
            self._config.bias == "all"
            and self._base.bias(head) is not None
            and (module == head or self._reaches_head())
        ):
            raise AdapterUnsupported(
                "trainable_token_indices of an output head that has a bias is not supported with bias='all'"
            )
        if head in self._targets and (module == head or self._reaches_head()):
            raise AdapterUnsupported(
                "trainable_token_indices together with a low-rank update of the output head is not supported"
            )

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._base.device)

    def _check_pair(self, module: str, lora_a: Tensor, lora_b: Tensor, out_features: int, in_features: int) -> int:
        """The pair's rank, after everything about its shapes was checked."""
        a_shape, b_shape = list(lora_a.shape), list(lora_b.shape)
        if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1] or a_shape[0] == 0:
            raise AdapterCorrupt(
                f"lora_A and lora_B of {module} do not form a pair",
                got=f"{a_shape} and {b_shape}",
                allowed="[rank, in] and [out, rank], rank at least 1; empty or flat tensors are an incomplete shard",
            )
        if a_shape[1] != in_features or b_shape[0] != out_features:
            raise AdapterIncompatible(
                f"{module} has another shape in this base",
                got=f"lora_A {a_shape}, lora_B {b_shape}",
                allowed=f"lora_A [rank, {in_features}], lora_B [{out_features}, rank]",
                do="load it over the base it was trained on",
            )
        expected = self._config.rank_of(self._pattern_name(module))
        if a_shape[0] != expected:
            raise AdapterCorrupt(
                f"the rank of {module} differs between config and weights",
                got=f"{a_shape[0]} in the weights, {expected} in adapter_config.json",
            )
        return a_shape[0]


def _ties_pairs(config: LoraConfig) -> bool:
    """Whether PEFT lets the ends of a tied base share one pair.

    Source: peft/tuners/tuners_utils.py, _check_tied_modules (0.21).
    """
    targets = config.target_modules
    if not config.ensures_tying or any(name.split(".")[-1] in END_NAMES for name in config.modules_to_save):
        return False
    if isinstance(targets, str):
        return any(pattern_match(FULL_NAME, targets, name) is not None for name in END_NAMES)
    return any(name.split(".")[-1] in END_NAMES for name in targets or ())


def _unblock(factor: Tensor, width: int) -> Tensor:
    """The dense form of a factor stored as stacked diagonal blocks, [rows, width / n]; a dense one unchanged.

    Source: peft/tuners/lora/variants.py, BlockDiagonalLinear.
    """
    if factor.dim() != 2 or factor.shape[1] in (0, width) or width % factor.shape[1]:
        return factor
    dense: Tensor = torch.block_diag(*factor.chunk(width // factor.shape[1], dim=0))  # type: ignore[no-untyped-call]
    return dense
