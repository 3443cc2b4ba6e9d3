"""A text file cut into sequences: some to calibrate on, some to measure on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graftlm.errors import ConfigurationError
from graftlm.text import Tokenizer

SEQUENCE_LEN = 512
# Beyond that scales hardly move; from a longer text as many are taken, evenly spread.
MAX_SEQUENCES = 128
# One sequence in so many is held out.
HELD_OUT_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """calibration, held_out: sequences of at least two token ids, as the model reads a prompt. Where the text is too
    short to hold anything out, they are the same."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]

    @property
    def is_held_out(self) -> bool:
        """Whether the model is measured on what it was not calibrated on."""
        return self.held_out != self.calibration


def read_calibration_text(path: Path, tokenizer: Tokenizer, *, max_len: int, vocab_size: int) -> CalibrationText:
    """
    Args:
        max_len: tokens the model can read at once. vocab_size: rows of its token table.

    Raises:
        ConfigurationError: the file cannot be read, is not UTF-8, has less than two tokens, or one the model lacks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigurationError(
            "the calibration text cannot be read", got=str(cause)[:200], allowed="a text file in UTF-8"
        ) from cause
    # What a prompt begins with, such as a BOS, which attention rests on.
    first_ids = tokenizer.encode("")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if (highest := max((*first_ids, *token_ids), default=0)) >= vocab_size:
        raise ConfigurationError(
            "the calibration text has a token that the model has no row for",
            got=tokenizer.token(highest),
            do="take it out of the text",
        )
    step = max(2, min(SEQUENCE_LEN, max_len) - len(first_ids))
    parts = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    sequences = [(*first_ids, *part) for part in parts if len(part) > 1]
    if not sequences:
        raise ConfigurationError(
            "the calibration text is too short", got=f"{len(token_ids)} tokens", do="give a text of a page or more"
        )
    stride = max(1.0, len(sequences) / MAX_SEQUENCES)
    chosen = [sequences[int(place * stride)] for place in range(min(len(sequences), MAX_SEQUENCES))]
    held_out = tuple(chosen[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or chosen[1:][-1:])
    if not held_out:
        return CalibrationText(calibration=tuple(chosen), held_out=tuple(chosen))
    measured = set(map(id, held_out))
    return CalibrationText(
        calibration=tuple(sequence for sequence in chosen if id(sequence) not in measured), held_out=held_out
    )
