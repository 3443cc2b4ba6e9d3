"""Parameters that mean nothing are refused when they are made, by name (R069, R084)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from graftlm import SamplingParams
from graftlm.errors import InvalidRequest

# No float holds it.
HUGE = 10**400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, -math.inf, "1", True, None, HUGE)],
        *[("top_p", value) for value in (0, 0.0, -0.1, 1.01, math.nan, True, "0.5", None, HUGE)],
        *[("min_p", value) for value in (-0.1, 1.01, math.nan, True, None)],
        *[("top_k", value) for value in (-1, 1.5, True, "3", None, 2**40)],
        *[("repetition_penalty", value) for value in (0, -1.0, math.inf, math.nan, True, None, HUGE)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan, True, None)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, math.inf, True, None)],
        *[("n", value) for value in (0, -1, 10**9, True, 1.0, None)],
        *[("max_tokens", value) for value in (-1, 2**40, 1.0, True, "5")],
        *[("min_tokens", value) for value in (-1, 17, True, None)],
        *[("seed", value) for value in (1.5, True, 2**64, -(2**63) - 1, "7")],
        *[("logprobs", value) for value in (-1, 21, True, 1.0)],
        *[("prompt_logprobs", value) for value in (-1, 21, True)],
        *[("stop", value) for value in ("", [""], ["a", ""], [5], [None], ["x"] * 17, 5, [b"a"])],
        *[("stop_token_ids", value) for value in ([-1], [1.5], [True], ["5"], 5, [None])],
        *[("logit_bias", value) for value in ({-1: 1}, {"x": 1}, {5: 1000}, {5: "a"}, {5: math.nan}, {True: 1}, [1])],
        *[("ignore_eos", value) for value in ("false", 1, None)],
        *[("skip_special_tokens", value) for value in ("false", 0, None)],
        *[("include_stop_str_in_output", value) for value in ("true", 1, None)],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_r084_values_without_meaning_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_r069_an_empty_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(stop=stop)
    assert refused.value.param == "stop"
