"""LoRA on parameters: the stacked matrices of experts, and single matrices such as a router's.

Files come in three forms: parameters named by `target_parameters`, in either of two layouts, and the experts' own
linear modules, which transformers had before version 5.
Source: peft/tuners/lora/layer.py, ParamWrapper; peft/utils/transformers_weight_conversion.py (0.21).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from graftlm.adapters.config import LoraConfig
from graftlm.adapters.config_values import first_match
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.errors import AdapterCorrupt, AdapterIncompatible, AdapterUnsupported
from graftlm.models.site import ExpertStack, LinearSite, SiteMap

# From this version on lora_A reads what the matrix multiplies, however it is stored; before, it reads the parameter's
# second dimension: huggingface/peft pull request 3165.
BY_MEANING = (0, 19, 1)
# The version that turned the wrong half of the parameters around: huggingface/peft pull request 3083.
TURNED_AROUND = (0, 19, 0)


@dataclass(frozen=True, kw_only=True)
class TargetedParameters:
    """stacks: in the order of registration. modules: those whose weight is adapted as a parameter."""

    stacks: tuple[ExpertStack, ...]
    modules: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class StackFactors:
    """lora_a, lora_b of each expert, [rank, in] and [out, rank], by the path of its matrix."""

    stack: ExpertStack
    rank: int
    pairs: dict[str, tuple[Tensor, Tensor]]


def select_parameters(config: LoraConfig, sites: SiteMap) -> TargetedParameters:
    """What `target_parameters` names.

    Raises:
        AdapterIncompatible: a name that no parameter of this base answers to.
        AdapterUnsupported: a parameter that is no expert's, router's or linear layer's weight.
    """
    parameters = {*sites.expert_stacks, *(f"{path}.weight" for path in sites.module_paths)}
    for name in config.target_parameters:
        if not any(_answers(parameter, name) for parameter in parameters):
            raise AdapterIncompatible(f"target_parameters names {name[:200]}, which this base does not have")
    modules = frozenset(path for path in sites.module_paths if _is_named(config, f"{path}.weight"))
    for path in sorted(modules):
        if path not in sites.matrices or sites.matrices[path].transposed:
            raise AdapterUnsupported(
                f"target_parameters names {path}.weight, which cannot be adapted as a parameter",
                allowed="weights of experts, routers and linear layers",
            )
    stacks = tuple(stack for path, stack in sites.expert_stacks.items() if _is_named(config, path))
    return TargetedParameters(stacks=stacks, modules=modules)


def check_plain(config: LoraConfig) -> None:
    """Raise for what PEFT, too, cannot do to parameters.

    Raises:
        AdapterUnsupported
    """
    variants = {
        "use_dora": config.use_dora,
        "lora_bias": config.use_lora_bias,
        "init_lora_weights": config.initialisation != "plain",
        "use_bdlora": config.is_block_diagonal,
        "alora_invocation_tokens": bool(config.invocation_token_ids),
    }
    asked = [name for name, is_asked in variants.items() if is_asked]
    if asked:
        raise AdapterUnsupported(
            f"adapter_config.json: {', '.join(asked)} does not go with adapted experts, routers or parameters",
            allowed="plain LoRA",
        )


def check_expert_module(config: LoraConfig, sites: SiteMap, module: str) -> None:
    """Raise where PEFT gives an expert's own module another scaling than it was trained with: it joins the factors of
    modules that are one parameter now, and does not carry patterns over.

    Raises:
        AdapterUnsupported
    """
    site = sites.matrices[module]
    is_joined = any(other.slot == site.slot and other.out_features > site.out_features for other in _stacked(sites))
    if config.use_rslora and is_joined:
        raise AdapterUnsupported(
            f"use_rslora with {module}: PEFT scales it by the square root of twice its rank, not as it was trained",
            do="set use_rslora to false and lora_alpha to lora_alpha * sqrt(r) in adapter_config.json",
        )
    if first_match(config.alpha_pattern, module, config.alpha) != config.alpha:
        raise AdapterUnsupported(
            f"alpha_pattern has a value for {module}, which PEFT does not apply to modules of single experts",
            do="multiply it into lora_B",
        )


def take_stacks(
    config: LoraConfig, tensors: ModuleTensors, sites: SiteMap, stacks: tuple[ExpertStack, ...]
) -> Iterator[StackFactors]:
    """The factors of every stack that the file has any for.

    Raises:
        AdapterCorrupt, AdapterIncompatible
    """
    for stack, roles in stack_roles(stacks):
        if stack.module in tensors.modules_with(*roles):
            lora_a, lora_b = (tensors.require(stack.module, role).float() for role in roles)
            yield _by_expert(config, sites, stack, lora_a, lora_b)


def stack_roles(stacks: tuple[ExpertStack, ...]) -> Iterator[tuple[ExpertStack, tuple[str, str]]]:
    """What PEFT calls each stack's two factors in the module that holds it.

    Several parameters of one module are nested, the one registered first innermost.
    """
    by_module: dict[str, list[ExpertStack]] = defaultdict(list)
    for stack in stacks:
        by_module[stack.module].append(stack)
    for targeted in by_module.values():
        for depth, stack in enumerate(reversed(targeted)):
            prefix = "base_layer." * depth
            yield stack, (f"{prefix}lora_A.weight", f"{prefix}lora_B.weight")


def expert_factors(lora_a: Tensor, lora_b: Tensor, index: int, *, count: int) -> tuple[Tensor, Tensor]:
    """One expert's pair of a stack's: rows of lora_A are expert by expert, columns of lora_B rank by rank."""
    rank = lora_a.shape[0] // count
    return lora_a[index * rank : (index + 1) * rank], lora_b[:, index::count]


def _by_expert(config: LoraConfig, sites: SiteMap, stack: ExpertStack, lora_a: Tensor, lora_b: Tensor) -> StackFactors:
    count, rank = len(stack.experts), config.rank_of(stack.path)
    is_turned = _is_turned_around(config, sites.matrices[stack.experts[0]], stack, lora_a, lora_b)
    if lora_a.shape[0] != count * rank or lora_b.shape[1] != count * rank:
        raise AdapterCorrupt(
            f"the rank of {stack.path} differs between config and weights",
            got=f"lora_A {list(lora_a.shape)}, lora_B {list(lora_b.shape)}",
            allowed=f"rank {rank} for each of {count} experts",
        )
    pairs = {}
    for index, path in enumerate(stack.experts):
        expert_a, expert_b = expert_factors(lora_a, lora_b, index, count=count)
        pairs[path] = (expert_b.t(), expert_a.t()) if is_turned else (expert_a, expert_b)
    return StackFactors(stack=stack, rank=rank, pairs=pairs)


def _is_turned_around(config: LoraConfig, site: LinearSite, stack: ExpertStack, lora_a: Tensor, lora_b: Tensor) -> bool:
    """Whether lora_A reads the matrices' output side."""
    is_flat = lora_a.dim() == 2 and lora_b.dim() == 2
    sides = (lora_a.shape[1], lora_b.shape[0]) if is_flat else None
    if sides not in ((site.in_features, site.out_features), (site.out_features, site.in_features)):
        raise AdapterIncompatible(
            f"{stack.path} has another shape in this base",
            got=f"lora_A {list(lora_a.shape)}, lora_B {list(lora_b.shape)}",
            allowed=f"lora_A [n, {site.in_features}], lora_B [{site.out_features}, n], or the two sides exchanged",
            do="load it over the base it was trained on",
        )
    if site.in_features != site.out_features:
        return sides != (site.in_features, site.out_features)
    # Square: only the version tells.
    return config.peft_version == TURNED_AROUND if stack.transposed else config.peft_version < BY_MEANING


def _is_named(config: LoraConfig, parameter: str) -> bool:
    return any(_answers(parameter, name) for name in config.target_parameters)


def _answers(parameter: str, name: str) -> bool:
    return parameter == name or parameter.endswith(f".{name}")


def _stacked(sites: SiteMap) -> Iterator[LinearSite]:
    return (sites.matrices[path] for stack in sites.expert_stacks.values() for path in stack.experts)
