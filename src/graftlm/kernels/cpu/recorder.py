"""Computations that are the library's calls and nothing else, recorded and played back by one call.

What a step costs in Python is then paid once for each shape of step, as with CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graftlm.kernels.cpu.call_log import Arena, CallLog, logging_to
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.kernel_set import NotRecordable


class CallRecorder:
    """Recordings of one recorder share memory for what they compute: they are played one at a time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._arena = Arena()

    def record(self, compute: Callable[[], Tensor]) -> CallRecording:
        """As `kernel_set.Recorder`."""
        log = CallLog(self._arena)
        with logging_to(log), _ViewsOnly():  # type: ignore[no-untyped-call]
            result = compute()
        return CallRecording(self._library, log, result)


class CallRecording:
    """result: where each play puts what was computed."""

    def __init__(self, library: Library, log: CallLog, result: Tensor) -> None:
        self.result = result
        self._library = library
        self._log = log
        self._address = log.words.buffer_info()[0]

    def play(self) -> None:
        self._library.replay(self._address, self._log.num_calls)


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, torch computes nothing: all it may do is to look at the same memory otherwise.

    Raises NotRecordable at the first operation that does more.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        made = list(_tensors((result,)))
        if not made or any(tensor.untyped_storage().data_ptr() not in given for tensor in made) or _writes(func):
            raise NotRecordable(str(func))
        return result


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _writes(operation: Any) -> bool:
    return bool(operation._schema.is_mutable)
