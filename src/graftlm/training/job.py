"""One training job: every option with its default, once. The command line, job files and the docs read this class."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graftlm.errors import ConfigurationError

Schedule = Literal["cosine", "linear", "constant"]
Bias = Literal["none", "lora_only", "all"]
ObjectiveName = Literal["sft", "dpo"]
LongDocuments = Literal["truncate", "split", "refuse"]
DEFAULT_RANK, DEFAULT_ALPHA, DEFAULT_TARGETS = 16, 32.0, "all-linear"

_NAME_LIST = re.compile(r"[\w.-]+(,[\w.-]+)*")
_ID_LIST = re.compile(r"[0-9]+(,[0-9]+)*")
# Options that a job file may write as lists.
_LISTS = ("target_modules", "modules_to_save", "trainable_token_indices", "target_parameters")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One adapter to train.

    Args:
        data: JSON Lines or Parquet file, or hub:ORGANISATION/NAME:SPLIT, whose rows have `messages`, `prompt` and
            `completion`, or `text`; for dpo `prompt`, `chosen` and `rejected`.
        output: folder for the adapter, its metrics and its checkpoint; new or empty, unless the run is resumed.
        name: what messages call the job; default: the last part of `output`.
        init_adapter: PEFT folder of a LoRA to start from, instead of one that changes nothing.
        rank: of the update; default: 16, or that of `init_adapter`.
        alpha: the update is scaled by alpha / rank; default: 32, or that of `init_adapter`.
        target_modules: ends of module names with commas between them, one regular expression for whole names, or
            all-linear; default: all-linear, or those of `init_adapter`.
        modules_to_save: ends of names, with commas between them, of modules that are trained whole: norms, linear
            layers, the embedding, the head. As in PEFT, an end need not begin at a dot: norm is every module that ends
            in norm.
        trainable_token_indices: ids, with commas between them, of tokens that get embedding rows of their own; the
            rows are the head's too if it is tied.
        target_parameters: ends of names, with commas between them, of stacked matrices of experts, such as
            mlp.experts.down_proj, each of which gets a low-rank update.
        objective: sft, to make what the rows say likely, or dpo, to make what they prefer likelier than what they
            reject (direct preference optimisation; the reference is the base without the adapter).
        beta: how closely dpo stays with the reference.
        rslora: scale by alpha / sqrt(rank) instead.
        dora: learn the length of each row of the adapted weights separately (DoRA).
        lora_bias: learn a bias beside each adapted module's update, scaled as the update is.
        bias: whose biases are trained too: none, lora_only (the adapted modules'), or all (every linear layer's and
            norm's); default: none, or that of `init_adapter`.
        dropout: probability with which the updates do not see an element of their input while they are trained;
            default: 0, or that of `init_adapter`.
        lr: learning rate, after the warm-up.
        schedule: what becomes of the learning rate by the last step; cosine and linear end at zero.
        warmup_steps: steps in which the learning rate grows to `lr`; default: 3 % of all, none if constant.
        weight_decay: AdamW's.
        max_grad_norm: the gradient is scaled down to this norm; 0 for never.
        steps: updates to make; default: as many as `epochs` take.
        epochs: times each row is seen, if `steps` is not given.
        batch_size: rows per forward pass.
        accumulate: forward passes per update; their loss is one mean over all their tokens.
        shuffle: draw a new order of the rows for each epoch.
        max_length: longest document in tokens; default: 1024, or the model's context if that is shorter.
        long_documents: what happens to longer ones.
        seed: of initialisation and order.
        eval_data: rows whose loss is measured and not learnt from.
        eval_fraction: part of `data` that is held out for the same.
        eval_every: updates between two measurements; default: at the end only.
        patience: measurements without a better loss after which the job ends early; 0 for never.
        save_every: updates between two checkpoints; 0 for none before the job is interrupted.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    data: str
    output: str
    name: str = ""
    init_adapter: str | None = None
    rank: int | None = None
    alpha: float | None = None
    target_modules: str | None = None
    modules_to_save: str | None = None
    trainable_token_indices: str | None = None
    target_parameters: str | None = None
    objective: ObjectiveName = "sft"
    beta: float = 0.1
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    bias: Bias | None = None
    dropout: float | None = None
    lr: float = 2e-4
    schedule: Schedule = "cosine"
    warmup_steps: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    steps: int | None = None
    epochs: int = 1
    batch_size: int = 8
    accumulate: int = 1
    shuffle: bool = True
    max_length: int | None = None
    long_documents: LongDocuments = "truncate"
    seed: int = 0
    eval_data: str | None = None
    eval_fraction: float = 0.0
    eval_every: int | None = None
    patience: int = 0
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("data", "output"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigurationError(f"a training job needs {name}", got=repr(getattr(self, name)))
        for name in ("rank", "steps", "epochs", "batch_size", "accumulate", "max_length", "eval_every"):
            self._check_integer(name, lowest=1)
        for name in ("warmup_steps", "patience", "save_every", "seed"):
            self._check_integer(name, lowest=0)
        for name in ("lr", "alpha", "beta"):
            self._check_number(name, above_zero=True)
        for name in ("weight_decay", "max_grad_norm", "eval_fraction"):
            self._check_number(name, above_zero=False)
        if self.bias not in (None, *Bias.__args__):  # type: ignore[attr-defined]
            allowed = ", ".join(Bias.__args__)  # type: ignore[attr-defined]
            raise ConfigurationError("bias has an unknown value", got=self.bias, allowed=allowed)
        if self.dropout is not None:
            check_dropout("dropout", self.dropout)
        if self.eval_fraction >= 1:
            raise ConfigurationError("eval_fraction leaves nothing to learn from", got=self.eval_fraction)
        if self.eval_data is not None and self.eval_fraction:
            raise ConfigurationError("eval_data and eval_fraction are two ways to say one thing", do="leave one out")
        for name, form in (
            ("modules_to_save", _NAME_LIST),
            ("target_parameters", _NAME_LIST),
            ("trainable_token_indices", _ID_LIST),
        ):
            if (value := getattr(self, name)) is not None and not form.fullmatch(str(value)):
                what = "token ids" if form is _ID_LIST else "names"
                raise ConfigurationError(
                    f"{name} is not usable", got=repr(value), allowed=f"{what}, with commas between"
                )
        for name, words in (
            ("schedule", Schedule),
            ("long_documents", LongDocuments),
            ("objective", ObjectiveName),
        ):
            if getattr(self, name) not in words.__args__:  # type: ignore[attr-defined]
                allowed = ", ".join(words.__args__)  # type: ignore[attr-defined]
                raise ConfigurationError(f"{name} has an unknown value", got=getattr(self, name), allowed=allowed)

        if self.objective == "dpo" and self.long_documents == "split":
            raise ConfigurationError("a pair of answers cannot be split", do="let long_documents be truncate or refuse")

    @property
    def label(self) -> str:
        """What messages call the job."""
        return self.name or Path(self.output).name

    @property
    def targets(self) -> list[str] | str | None:
        """`target_modules` as adapter_config.json spells it: a list of names, or one word or expression."""
        targets = self.target_modules
        if targets is None or targets.lower() == DEFAULT_TARGETS:
            return targets
        return targets.split(",") if _NAME_LIST.fullmatch(targets) else targets

    @property
    def saved_modules(self) -> list[str]:
        """`modules_to_save` as adapter_config.json has it."""
        return self.modules_to_save.split(",") if self.modules_to_save else []

    @property
    def parameters(self) -> list[str]:
        """`target_parameters` as adapter_config.json has it."""
        return self.target_parameters.split(",") if self.target_parameters else []

    @property
    def token_indices(self) -> list[int]:
        """`trainable_token_indices` as adapter_config.json has it."""
        return [int(index) for index in self.trainable_token_indices.split(",")] if self.trainable_token_indices else []

    def _check_integer(self, name: str, *, lowest: int) -> None:
        value = getattr(self, name)
        if value is None and _default_of(name) is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigurationError(f"{name} is not usable", got=repr(value), allowed=f"an integer from {lowest}")

    def _check_number(self, name: str, *, above_zero: bool) -> None:
        value = getattr(self, name)
        if value is None and _default_of(name) is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (above_zero and value == 0):
            allowed = "a finite number above 0" if above_zero else "a finite number from 0"
            raise ConfigurationError(f"{name} is not usable", got=repr(value), allowed=allowed)


def make_job(settings: Mapping[str, Any]) -> TrainingJob:
    """A job from values as a file or a caller has them: names may be a list, and paths may be paths.

    Raises:
        ConfigurationError: an option is unknown, missing, or out of its range.
    """
    known = [field.name for field in dataclasses.fields(TrainingJob)]
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigurationError("a training job has no such options", got=", ".join(unknown), allowed=", ".join(known))
    values = {"data": "", "output": "", **settings}
    for name in ("data", "output", "init_adapter", "eval_data"):
        if isinstance(values.get(name), Path):
            values[name] = str(values[name])
    for name in _LISTS:
        if isinstance(values.get(name), list | tuple):
            values[name] = ",".join(str(item) for item in values[name]) or None
    return TrainingJob(**values)


def check_dropout(name: str, value: object) -> None:
    """Raises: ConfigurationError: it is no probability below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigurationError(f"{name} is not usable", got=repr(value), allowed="a number from 0, below 1")


def _default_of(name: str) -> object:
    return TrainingJob.__dataclass_fields__[name].default
