"""What training starts from: an adapter config as PEFT writes it, and the tensors of an adapter that is given."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graftlm.adapters.config import LoraConfig, parse_lora_config
from graftlm.adapters.files import read_adapter_files
from graftlm.adapters.targets import select_targets
from graftlm.errors import AdapterUnsupported, ConfigurationError
from graftlm.models.site import SiteMap
from graftlm.training.job import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGETS, TrainingJob


@dataclass(frozen=True, kw_only=True)
class Start:
    """raw: adapter_config.json. config: what it says. targets: paths of the modules that are adapted, in model order.
    tensors: the given adapter's, under the file's names; None for a fresh one."""

    raw: Mapping[str, Any]
    config: LoraConfig
    targets: tuple[str, ...]
    tensors: Mapping[str, Tensor] | None


def choose_start(job: TrainingJob, sites: SiteMap, model: str) -> Start:
    """Where a job starts.

    Args:
        model: recorded in the config as the base.

    Raises:
        ConfigurationError: the job's targets name no module, or its options differ from those of its `init_adapter`.
        AdapterError: `init_adapter` cannot be read, or uses what is not trained here.
    """
    if job.init_adapter is None:
        raw = _fresh_config(job, sites, model)
        config = parse_lora_config(raw)
        return Start(raw=raw, config=config, targets=_targets(config, sites), tensors=None)
    files = read_adapter_files(job.init_adapter, max_bytes=1 << 62, allow_pickle=False)
    if files.config.get("peft_type") != "LORA":
        raise AdapterUnsupported(
            "init_adapter is not a LoRA", got=f"peft_type={files.config.get('peft_type')!r}"[:200], allowed="LORA"
        )
    config = parse_lora_config(files.config)
    _check_trainable(config)
    targets = _targets(config, sites)
    _check_same(job, config, targets, sites)
    raw = {**files.config, "base_model_name_or_path": model, "inference_mode": True, "lora_dropout": 0.0}
    return Start(raw=raw, config=config, targets=targets, tensors=files.tensors)


def _fresh_config(job: TrainingJob, sites: SiteMap, model: str) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "base_model_name_or_path": model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": DEFAULT_ALPHA if job.alpha is None else job.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": DEFAULT_RANK if job.rank is None else job.rank,
        "target_modules": job.targets or DEFAULT_TARGETS,
        "task_type": "CAUSAL_LM",
        "use_dora": job.dora,
        "use_rslora": job.rslora,
    }
    if float(raw["lora_alpha"]).is_integer():
        raw["lora_alpha"] = int(raw["lora_alpha"])
    targets = _targets(parse_lora_config(raw), sites)
    raw["target_modules"] = _as_names(raw, targets, sites)
    raw["fan_in_fan_out"] = any(path in sites.matrices and sites.matrices[path].transposed for path in targets)
    return raw


def _as_names(raw: Mapping[str, Any], targets: tuple[str, ...], sites: SiteMap) -> list[str] | str:
    """The same modules as a list of names, which every reader of PEFT folders understands."""
    for names in ({path.rpartition(".")[2] for path in targets}, set(targets)):
        listed = {**raw, "target_modules": sorted(names)}
        if set(_targets(parse_lora_config(listed), sites)) == set(targets):
            return sorted(names)
    raise AssertionError("full names select just the modules they name")


def _targets(config: LoraConfig, sites: SiteMap) -> tuple[str, ...]:
    selected = select_targets(config, sites, {*sites.linears, sites.embedding_path})
    if isinstance(config.target_modules, tuple):
        unknown = [name for name in config.target_modules if not any(_ends_with(path, name) for path in selected)]
    else:
        unknown = [] if selected else [str(config.target_modules)]
    if unknown:
        endings = sorted({path.rpartition(".")[2] for path in (*sites.linears, sites.embedding_path)})
        close = difflib.get_close_matches(unknown[0], endings, n=3, cutoff=0.4)
        raise ConfigurationError(
            "target_modules names no module of this model",
            got=", ".join(unknown),
            allowed=", ".join(endings),
            do=f"did you mean {', '.join(close)}?" if close else None,
        )
    order = (sites.embedding_path, *sites.linears)
    return tuple(path for path in order if path in selected)


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _check_trainable(config: LoraConfig) -> None:
    present = {
        "bias": config.bias != "none",
        "lora_bias": config.use_lora_bias,
        "init_lora_weights": config.initialisation != "plain",
        "use_bdlora": config.is_block_diagonal,
        "target_parameters": bool(config.target_parameters),
        "trainable_token_indices": bool(config.token_indices),
        "alora_invocation_tokens": bool(config.invocation_token_ids),
        "modules_to_save": bool(config.modules_to_save),
    }
    if names := [name for name, is_present in present.items() if is_present]:
        raise AdapterUnsupported(
            "init_adapter uses what cannot be trained here", got=", ".join(names), allowed="LoRA, rsLoRA, DoRA"
        )


def _check_same(job: TrainingJob, config: LoraConfig, targets: tuple[str, ...], sites: SiteMap) -> None:
    differences = [
        f"{name}: {asked} asked, {found} in init_adapter"
        for name, asked, found in (
            ("rank", job.rank, config.rank),
            ("alpha", job.alpha, config.alpha),
            ("rslora", job.rslora or None, config.use_rslora),
            ("dora", job.dora or None, config.use_dora),
        )
        if asked is not None and asked != found
    ]
    if job.targets is not None:
        fresh = {"target_modules": job.targets, "task_type": "CAUSAL_LM"}
        asked_targets = _targets(parse_lora_config(fresh), sites)
        if asked_targets != targets:
            differences.append(f"target_modules: {len(asked_targets)} modules asked, {len(targets)} in init_adapter")
    if differences:
        raise ConfigurationError("the job's options differ from init_adapter's", got="; ".join(differences))
