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
    """As `kernel_set.Recorder`. All memory of its recordings but their calls is shared among them."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._arena = Arena()

    def record(self, inputs: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], Tensor]) -> CallRecording:
        log = CallLog(self._arena)
        held = [log.empty(tensor.shape, tensor.dtype).copy_(tensor) for tensor in inputs]
        with logging_to(log), _ViewsOnly():  # type: ignore[no-untyped-call]
            result = compute(held)
        return CallRecording(self._library, log, [Arena.unleased(tensor) for tensor in held], Arena.unleased(result))


class CallRecording:
    """As `kernel_set.Recording`. inputs, result: where its calls read and write."""

    def __init__(self, library: Library, log: CallLog, inputs: Sequence[Tensor], result: Tensor) -> None:
        self._library = library
        self._log = log
        self._address = log.words.buffer_info()[0]
        self._inputs = inputs
        self._result = result

    @property
    def result(self) -> Tensor:
        return self._result.clone()

    def play(self, inputs: Sequence[Tensor]) -> Tensor:
        for own, tensor in zip(self._inputs, inputs, strict=True):
            own.copy_(tensor)
        self._library.replay(self._address, self._log.num_calls)
        return self.result


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
