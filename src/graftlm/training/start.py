"""What training starts from: an adapter config as PEFT writes it, and the tensors of an adapter that is given."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from graftlm.adapters.config import LoraConfig, parse_lora_config
from graftlm.adapters.files import read_adapter_files
from graftlm.adapters.methods.parameters import BY_MEANING, select_parameters
from graftlm.adapters.targets import is_saved, select_targets
from graftlm.errors import AdapterUnsupported, ConfigurationError
from graftlm.models.site import ExpertStack, SiteMap
from graftlm.training.job import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGETS, TrainingJob, check_dropout

# Of PEFT, whose layout is written.
PEFT_VERSION = "0.21.0"


@dataclass(frozen=True, kw_only=True)
class Start:
    """raw: adapter_config.json. config: what it says. tensors: the given adapter's, under the file's names; None for a
    fresh one.

    targets: paths of the modules with a low-rank update, in model order. stacks: of experts, with one for each. saved:
    paths of the modules that are trained whole. token_ids: of the tokens whose rows are trained, by the path of the
    embedding or the head; rows_reach_head: those of the embedding are the head's too. dropout: of the updates' inputs.
    """

    raw: Mapping[str, Any]
    config: LoraConfig
    tensors: Mapping[str, Tensor] | None
    targets: tuple[str, ...]
    stacks: tuple[ExpertStack, ...]
    saved: tuple[str, ...]
    token_ids: Mapping[str, tuple[int, ...]]
    rows_reach_head: bool
    dropout: float


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
        return _make_start(raw, sites, None)
    files = read_adapter_files(job.init_adapter, max_bytes=1 << 62, allow_pickle=False)
    if files.config.get("peft_type") != "LORA":
        raise AdapterUnsupported(
            "init_adapter is not a LoRA", got=f"peft_type={files.config.get('peft_type')!r}"[:200], allowed="LORA"
        )
    config = parse_lora_config(files.config)
    _check_trainable(config, sites)
    _check_same(job, config, sites)
    dropout = (files.config.get("lora_dropout") or 0.0) if job.dropout is None else job.dropout
    raw = {**files.config, "base_model_name_or_path": model, "inference_mode": True, "lora_dropout": dropout}
    return _make_start(raw, sites, files.tensors)


def _make_start(raw: Mapping[str, Any], sites: SiteMap, tensors: Mapping[str, Tensor] | None) -> Start:
    config = parse_lora_config(raw)
    start = Start(
        raw=raw,
        config=config,
        tensors=tensors,
        targets=_targets(config, sites),
        stacks=_stacks(config, sites),
        saved=_saved(config, sites),
        token_ids=_token_ids(config, sites),
        rows_reach_head=sites.tied_head and len(set(config.token_indices.values())) == 1,
        dropout=raw["lora_dropout"],
    )
    check_dropout("lora_dropout", start.dropout)
    _check_goes_together(start, sites)
    return start


def _check_goes_together(start: Start, sites: SiteMap) -> None:
    """Raise for what PEFT refuses too."""
    if start.dropout and start.stacks:
        raise AdapterUnsupported(
            "dropout is not offered for the inputs of experts",
            got=", ".join(stack.path for stack in start.stacks[:5]),
            do="set dropout to 0, or leave them out of target_parameters",
        )
    others = {
        "dora": start.config.use_dora,
        f"target_modules={sites.embedding_path}": sites.embedding_path in start.targets,
        "target_parameters": bool(start.stacks),
    }
    if start.config.use_lora_bias and any(others.values()):
        raise AdapterUnsupported(
            "lora_bias does not go with what is asked beside it",
            got=", ".join(name for name, is_asked in others.items() if is_asked),
            do="leave lora_bias out, or them",
        )


def _fresh_config(job: TrainingJob, sites: SiteMap, model: str) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "base_model_name_or_path": model,
        "bias": job.bias or "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": DEFAULT_ALPHA if job.alpha is None else job.alpha,
        "lora_bias": job.lora_bias,
        "lora_dropout": job.dropout or 0.0,
        "modules_to_save": job.saved_modules or None,
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "r": DEFAULT_RANK if job.rank is None else job.rank,
        "target_modules": job.targets or DEFAULT_TARGETS,
        "target_parameters": job.parameters or None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": job.token_indices or None,
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


def _stacks(config: LoraConfig, sites: SiteMap) -> tuple[ExpertStack, ...]:
    found = select_parameters(config, sites)
    if found.modules:
        raise AdapterUnsupported(
            "target_parameters names what is not trained as a parameter",
            got=", ".join(sorted(found.modules)[:5]),
            allowed=", ".join(sorted({path.rpartition(".")[2] for path in sites.expert_stacks})) or "experts' matrices",
        )
    return found.stacks


def _saved(config: LoraConfig, sites: SiteMap) -> tuple[str, ...]:
    """In model order: the embedding, norms, linear layers."""
    names = config.modules_to_save
    covered = [path for path in sites.module_paths if is_saved(config, path)]
    for name in names:
        if not any(is_saved(replace(config, modules_to_save=(name,)), path) for path in covered):
            endings = sorted({path.rpartition(".")[2] for path in sites.module_paths})
            raise ConfigurationError(
                "modules_to_save names no module of this model", got=name, allowed=", ".join(endings)
            )
    if unknown := sorted(path for path in covered if path in sites.other_paths or path in sites.routers):
        raise AdapterUnsupported(
            "modules_to_save names what is not trained whole",
            got=", ".join(unknown[:5]),
            allowed="linear layers, norms, the embedding, the head",
        )
    order = (sites.embedding_path, *sites.norms, *sites.linears)
    return tuple(path for path in order if path in covered)


def _token_ids(config: LoraConfig, sites: SiteMap) -> dict[str, tuple[int, ...]]:
    ends = (sites.embedding_path, sites.head_path)
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in config.token_indices.items():
        path = next((end for end in ends if end.endswith(name)), None) if name else sites.embedding_path
        if path is None:
            raise ConfigurationError(
                "trainable_token_indices names a module without tokens", got=name, allowed=" or ".join(ends)
            )
        if not ids or max(ids) >= sites.vocab_size:
            raise ConfigurationError(
                "trainable_token_indices names tokens that the model has no rows for",
                got=str(list(ids))[:200],
                allowed=f"token ids below {sites.vocab_size}",
            )
        found[path] = ids
    return found


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _check_trainable(config: LoraConfig, sites: SiteMap) -> None:
    present = {
        "init_lora_weights": config.initialisation != "plain",
        "use_bdlora": config.is_block_diagonal,
        "target_parameters in the layout of PEFT before 0.19.1": (
            bool(config.target_parameters) and config.peft_version < BY_MEANING
        ),
        "layer_replication": bool(config.layer_ranges),
        "ensure_weight_tying": config.ensures_tying and sites.tied_head,
        "alora_invocation_tokens": bool(config.invocation_token_ids),
    }
    if names := [name for name, is_present in present.items() if is_present]:
        raise AdapterUnsupported(
            "init_adapter uses what cannot be trained here",
            got=", ".join(names),
            allowed="LoRA, rsLoRA, DoRA, bias, lora_bias, modules_to_save, trainable_token_indices, target_parameters",
        )


def _check_same(job: TrainingJob, config: LoraConfig, sites: SiteMap) -> None:
    differences = [
        f"{name}: {asked} asked, {found} in init_adapter"
        for name, asked, found in (
            ("rank", job.rank, config.rank),
            ("alpha", job.alpha, config.alpha),
            ("rslora", job.rslora or None, config.use_rslora),
            ("dora", job.dora or None, config.use_dora),
            ("lora_bias", job.lora_bias or None, config.use_lora_bias),
            ("bias", job.bias and job.bias.replace("lora_only", "adapted"), config.bias),
            ("modules_to_save", job.saved_modules or None, list(config.modules_to_save)),
            ("target_parameters", job.parameters or None, list(config.target_parameters)),
            ("trainable_token_indices", job.token_indices or None, list(config.token_indices.get("", ()))),
        )
        if asked is not None and asked != found
    ]
    if job.targets is not None:
        fresh = {"target_modules": job.targets, "task_type": "CAUSAL_LM"}
        asked_targets, targets = _targets(parse_lora_config(fresh), sites), _targets(config, sites)
        if asked_targets != targets:
            differences.append(f"target_modules: {len(asked_targets)} modules asked, {len(targets)} in init_adapter")
    if differences:
        raise ConfigurationError("the job's options differ from init_adapter's", got="; ".join(differences))
