"""How one request wants its tokens chosen and when it wants to stop. Plain data with validation; no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graftlm.engine.structured_output import StructuredOutput
from graftlm.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
# Below this a temperature is greedy: dividing fp32 logits by less adds nothing but overflow.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. Names, defaults and meanings follow vLLM's and OpenAI's parameters.

    Args:
        max_tokens: most tokens to generate; None means what is left of the context.
        min_tokens: end-of-sequence and stop conditions are held off until this many tokens are out.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        seed: the same seed gives the same tokens whatever else the engine is doing; None draws a fresh one.
        repetition_penalty: over prompt and output (CTRL, arXiv 1909.05858); 1 is off.
        presence_penalty, frequency_penalty: over the output only, in [-2, 2] (OpenAI).
        logit_bias: token id -> value in [-100, 100], added before everything else.
        stop: strings that end the answer; they never appear in it, not even in part.
        stop_token_ids: ids that end the answer beside the model's own end tokens; never part of the text.
        include_stop_str_in_output: the text keeps what ended it, a stop string or a stop token's text.
        skip_special_tokens: the text leaves special tokens out.
        ignore_eos: do not stop at the model's end tokens.
        structured: the form the answer must have.
        priority: of the request; lower is served first.
        n: independent answers to one prompt.
        logprobs: per generated token, its log-probability and those of the k best; 0 for the token alone.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        InvalidRequest: a value is outside its range; `param` names it.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    structured: StructuredOutput | None = None
    priority: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_integers()
        self._check_floats()
        self._check_logit_bias()
        self._check_stops()
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise InvalidRequest(
                "structured has the wrong type",
                param="structured",
                got=type(self.structured).__name__,
                allowed="StructuredOutput",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens is larger than max_tokens", param="min_tokens", got=f"{self.min_tokens} > {self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @cached_property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty applies to every token."""
        return (
            len(self.logit_bias) > 0
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _check_integers(self) -> None:
        largest = 2**31 - 1
        bounds: dict[str, tuple[int, int]] = {
            "max_tokens": (0, largest),
            "min_tokens": (0, largest),
            "top_k": (0, largest),
            "seed": (-(2**63), 2**64 - 1),
            "priority": (-largest, largest),
            "n": (1, MAX_N),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
        }
        optional = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                allowed = f"an integer from {low} to {high}"
                raise InvalidRequest(f"{name} is out of range", param=name, got=repr(value), allowed=allowed)

    def _check_floats(self) -> None:
        # (low, high, low itself allowed); GREEDY_TEMPERATURE makes every small temperature safe.
        bounds: dict[str, tuple[float, float, bool]] = {
            "temperature": (0.0, math.inf, True),
            "top_p": (0.0, 1.0, False),
            "min_p": (0.0, 1.0, True),
            "repetition_penalty": (0.0, math.inf, False),
            "presence_penalty": (-2.0, 2.0, True),
            "frequency_penalty": (-2.0, 2.0, True),
        }
        for name, (low, high, closed) in bounds.items():
            value = getattr(self, name)
            # The bound refuses NaN, infinities, and integers that no float can hold.
            is_number = (
                isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            )
            if not is_number or value < low or value > high or (value == low and not closed):
                upper = "" if math.isinf(high) else f" and at most {high:g}"
                allowed = f"a finite number {'at least' if closed else 'above'} {low:g}{upper}"
                raise InvalidRequest(f"{name} is out of range", param=name, got=repr(value), allowed=allowed)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                "logit_bias is not a mapping", param="logit_bias", got=repr(self.logit_bias), allowed="token id -> bias"
            )
        for token_id, bias in self.logit_bias.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise InvalidRequest(
                    "logit_bias has a key that is not a token id",
                    param="logit_bias",
                    got=repr(token_id),
                    allowed="token ids of the model, 0 or larger",
                )
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not is_number or not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is out of range",
                    param="logit_bias",
                    got=repr(bias),
                    allowed="a number from -100 to 100",
                )

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Collection):
                raise InvalidRequest(f"{name} is not a list", param=name, got=repr(getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name} is neither true nor false", param=name, got=repr(value))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                "too many stop strings", param="stop", got=len(self.stop), allowed=f"at most {MAX_STOP_STRINGS}"
            )
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(
                    "stop holds something that can never match",
                    param="stop",
                    got=repr(stop),
                    allowed="non-empty strings",
                )
        for token_id in self.stop_token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise InvalidRequest(
                    "stop_token_ids holds something that is not a token id",
                    param="stop_token_ids",
                    got=repr(token_id),
                    allowed="token ids, 0 or larger",
                )
