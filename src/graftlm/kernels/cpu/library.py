"""Finding and loading the C++ library for this machine's instruction sets."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from graftlm.kernels.cpu.call_log import current_log

logger = logging.getLogger(__name__)

Level = Literal["portable", "avx2", "avx512", "avx512_bf16", "amx"]

# Slowest first. Each needs the ones before it, and its bit of `graft_cpu_levels` but for the first.
LEVELS: tuple[Level, ...] = get_args(Level)

# One of the levels, or "none" for torch alone.
LEVEL_VARIABLE = "GRAFT_CPU_KERNELS"

_FOLDER = Path(__file__).parent

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

# Of each function, in the order of its declaration.
_ARGUMENTS: dict[str, Sequence[Any]] = {
    "graft_activate": (_POINTER, _POINTER, _INT, _INT, _LONG, _INT),
    "graft_add": (_POINTER, _POINTER, _INT, _LONG, _INT),
    "graft_add_layer_norm": (_POINTER,) * 5 + (_INT, _LONG, _LONG, _FLOAT, _INT),
    "graft_add_rms_norm": (_POINTER,) * 4 + (_INT, _INT, _LONG, _LONG, _FLOAT, _INT),
    "graft_advise_huge_pages": (_POINTER, _LONG),
    "graft_apply_rotary": (_POINTER,) * 4 + (_INT,) + (_LONG,) * 6 + (_INT,),
    "graft_coded_linear": (_POINTER,) * 4 + (_INT,) + (_LONG,) * 3 + (_INT,),
    "graft_copy_columns": (_POINTER, _POINTER, _INT) + (_LONG,) * 4 + (_INT,),
    "graft_decode_rows": (_POINTER,) * 3 + (_INT, _LONG, _INT),
    "graft_draw_tokens": (_POINTER,) * 3 + (_INT,) + (_LONG,) * 3 + (_INT,),
    "graft_gated_activation": (_POINTER, _POINTER, _INT, _INT, _LONG, _LONG, _INT),
    "graft_layer_norm": (_POINTER,) * 4 + (_INT, _LONG, _LONG, _FLOAT, _INT),
    "graft_linear": (_POINTER,) * 4 + (_INT,) + (_LONG,) * 5 + (_INT,),
    "graft_lora": (_POINTER,) * 3 + (_LONG, _INT, _INT) + (_LONG,) * 4 + (_INT, _INT),
    "graft_pack": (_POINTER, _POINTER, _INT, _LONG, _LONG, _INT),
    "graft_pack_codes": (_POINTER, _POINTER, _INT, _LONG, _LONG, _INT),
    "graft_paged_attention": (_POINTER,) * 5 + (_LONG, _POINTER, _POINTER, _INT, _INT, _INT),
    "graft_replay": (_POINTER, _LONG),
    "graft_request_tiles": (),
    "graft_rms_norm": (_POINTER,) * 3 + (_INT, _INT) + (_LONG,) * 4 + (_FLOAT, _INT),
    "graft_rotate_and_write": (_POINTER,) * 9 + (_INT, _LONG, _INT),
    "graft_token_logprobs": (_POINTER,) * 6 + (_INT,) + (_LONG,) * 4 + (_INT,),
    "graft_turned_coded_linear": (_POINTER,) * 3 + (_INT,) + (_LONG,) * 3 + (_INT,),
    "graft_turned_linear": (_POINTER,) * 3 + (_INT,) + (_LONG,) * 5 + (_INT,),
    "graft_unpack_rows": (_POINTER,) * 3 + (_INT, _LONG, _LONG, _INT),
    "graft_write_kv": (_POINTER,) * 3 + (_INT,) + (_LONG,) * 5 + (_INT,),
}


class Library:
    """The functions of one level; `graft_x` of csrc is the attribute `x`."""

    def __init__(self, level: Level, functions: ctypes.CDLL) -> None:
        self.level = level
        self.packed_size = functions.graft_packed_size
        self.packed_size.argtypes = (_INT, _LONG, _LONG)
        self.packed_size.restype = _LONG
        self.packed_code_bytes = functions.graft_packed_code_bytes
        self.packed_code_bytes.argtypes = (_INT, _LONG, _LONG)
        self.packed_code_bytes.restype = _LONG
        for name, arguments in _ARGUMENTS.items():
            function = getattr(functions, name)
            function.argtypes = arguments
            recorded = getattr(functions, f"{name}_recorded", None)
            if recorded is not None:
                function = _RecordableFunction(function, ctypes.cast(recorded, _POINTER).value or 0)
            setattr(self, name.removeprefix("graft_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernel library has no function {name}")


class _RecordableFunction:
    """A function whose calls go to the calling thread's log, too, where there is one. recorded: the address of what
    takes its arguments as words."""

    def __init__(self, function: Any, recorded: int) -> None:
        self._function = function
        self._recorded = recorded

    def __call__(self, *arguments: Any, keep: Sequence[object] = ()) -> Any:
        """keep: what is at addresses among the arguments, where the caller lets go of it."""
        log = current_log()
        if log is not None:
            log.add(self._recorded, [_word(argument) for argument in arguments], keep)
        return self._function(*arguments)


def _word(argument: float | None) -> int:
    """As csrc's `argument` reads it."""
    if isinstance(argument, float):
        bits: int = struct.unpack("i", struct.pack("f", argument))[0]
        return bits
    return 0 if argument is None else int(argument)


@dataclass(frozen=True, kw_only=True)
class Availability:
    """library: the fastest that this machine runs, or None. reason: why it is not a faster one, or there is none; empty
    if it is the fastest there is."""

    library: Library | None
    reason: str


@cache
def best_library() -> Availability:
    """The library that is used in this process, unless the environment asks for another level."""
    asked = os.environ.get(LEVEL_VARIABLE)
    if asked == "none":
        return Availability(library=None, reason=f"{LEVEL_VARIABLE}=none")
    if asked is not None and asked not in LEVELS:
        reason = f"{LEVEL_VARIABLE}={asked} is not one of none, {', '.join(LEVELS)}"
        logger.warning("%s; running on torch alone", reason)
        return Availability(library=None, reason=reason)
    runnable = runnable_levels()
    if not runnable:
        reason = "the C++ kernels are not built here: there was no C++ compiler with OpenMP at installation"
        logger.info("%s; running on torch alone", reason)
        return Availability(library=None, reason=reason)
    if asked is not None:
        if asked not in runnable:
            return Availability(library=None, reason=f"{LEVEL_VARIABLE}={asked}, which this machine cannot run")
        return Availability(library=open_library(asked), reason=f"{LEVEL_VARIABLE}={asked}")
    missing = LEVELS[LEVELS.index(runnable[-1]) + 1 :]
    reason = f"this machine lacks {missing[0]}" if missing else ""
    return Availability(library=open_library(runnable[-1]), reason=reason)


@cache
def runnable_levels() -> tuple[Level, ...]:
    """The levels that are built and that this machine can run, slowest first."""
    built = [level for level in LEVELS if _path(level).is_file()]
    if not built:
        return ()
    found = int(ctypes.CDLL(str(_path(built[0]))).graft_cpu_levels())
    return tuple(level for level in built if level == LEVELS[0] or found >> (LEVELS.index(level) - 1) & 1)


@cache
def open_library(level: Level) -> Library:
    """Torch must have been imported: its OpenMP runtime is then shared, and there is one pool of threads.

    Raises:
        OSError: the level was not built, or the system does not let its registers be used.
    """
    library = Library(level, ctypes.CDLL(str(_path(level))))
    if level == "amx" and library.request_tiles() != 0:
        raise OSError("the system does not grant the tile registers of AMX")
    return library


def _path(level: Level) -> Path:
    return _FOLDER / f"graft_{level}.so"
