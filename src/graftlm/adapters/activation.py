"""Where in a prompt an adapter becomes active."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.adapters.adapter import Adapter


def active_from(prompt_token_ids: Sequence[int], adapter: Adapter | None) -> int:
    """Position from which the adapter is active: 0 for all but activated LoRAs.

    An activated LoRA starts at the last occurrence of its invocation tokens in the prompt, the tokens themselves
    included, and never when they do not occur. Invocation tokens that are generated do not switch it on.
    Source: peft/tuners/lora/variants.py, calculate_alora_offsets.
    """
    if adapter is None or not adapter.invocation_token_ids:
        return 0
    invocation = list(adapter.invocation_token_ids)
    prompt = list(prompt_token_ids)
    for start in range(len(prompt) - len(invocation), -1, -1):
        if prompt[start : start + len(invocation)] == invocation:
            return start
    return NEVER


# Beyond every position.
NEVER = 1 << 62
