"""Which layers see only a window of the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config: ConfigReader, window: int | None, *, sliding: Sequence[bool]) -> tuple[int | None, ...]:
    """Each layer's window; None for all tokens.

    Args:
        window: of the layers that have one; None if none can.
        sliding: which layers have it when the config has no `layer_types`.

    Raises:
        CheckpointError: `layer_types` is no list of known types, one for each layer, or asks for a window there is not.
    """
    types = config.get("layer_types", [SLIDING if slides else FULL for slides in sliding])
    if not isinstance(types, list) or len(types) != len(sliding) or not all(kind in (FULL, SLIDING) for kind in types):
        raise CheckpointError(
            "config.json: layer_types is not supported",
            got=repr(types)[:100],
            allowed=f"{len(sliding)} of {FULL}, {SLIDING}",
        )
    if window is None and SLIDING in types:
        raise CheckpointError(f"config.json: layer_types has {SLIDING}, but there is no sliding window")
    return tuple(window if kind == SLIDING else None for kind in types)


def read_upper_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window in Qwen's spelling: `use_sliding_window` switches it on, for layers from `max_window_layers`
    on unless `layer_types` says otherwise.

    Raises:
        CheckpointError: as `read_windows`.
    """
    switched_on = config.flag("use_sliding_window")
    window = config.integer_or_null("sliding_window", 4096)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise CheckpointError("config.json: max_window_layers is not an integer", got=repr(first)[:100])
    window = window if switched_on else None
    return read_windows(config, window, sliding=[window is not None and index >= first for index in range(num_layers)])
