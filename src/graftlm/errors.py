"""Every exception Graft raises on purpose. Each message has four parts: what went wrong, what was got, what is
allowed, and what to do. Knows nothing of HTTP; `server/errors.py` maps types to statuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_NAMES_SHOWN = 20


class GraftError(Exception):
    """Base of all Graft errors.

    Args:
        what: the fact, in one sentence.
        got: the offending value, if there is one to show.
        allowed: what would have been accepted.
        do: what the reader can do about it.
    """

    def __init__(self, what: str, *, got: object = None, allowed: str | None = None, do: str | None = None) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.do = do
        parts = [what]
        if got is not None:
            parts.append(f"got: {got}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if do is not None:
            parts.append(f"do: {do}")
        super().__init__("; ".join(parts))


class ConfigurationError(GraftError, ValueError):
    """An engine option has no meaning or cannot be met on this machine."""


class InvalidRequest(GraftError, ValueError):
    """A request asks for something impossible. `param` names the field at fault."""

    def __init__(
        self,
        what: str,
        *,
        param: str | None = None,
        got: object = None,
        allowed: str | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, got=got, allowed=allowed, do=do)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit the model's context."""


class ModelNotFound(GraftError, LookupError):
    """No base model or adapter answers to this name.

    Args:
        name: what was asked for.
        known: every name that would have been answered; the message shows the first of them.
    """

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        more = f" and {len(known) - _MAX_NAMES_SHOWN} more" if len(known) > _MAX_NAMES_SHOWN else ""
        shown = ", ".join(known[:_MAX_NAMES_SHOWN]) + more
        super().__init__("no model answers to this name", got=repr(name)[:100], allowed=shown or "none")

    def told_to(self, may_see: Callable[[str], bool]) -> ModelNotFound:
        """The same error for somebody who must not learn of every name."""
        return ModelNotFound(self.name, [name for name in self.known if may_see(name)])


class CheckpointError(GraftError, ValueError):
    """A base model cannot be read: files, config or tensors are missing, extra, misshapen or unsupported."""


class AdapterError(GraftError, ValueError):
    """Base of everything that can be wrong with an adapter."""


class AdapterFilesNotFound(AdapterError, FileNotFoundError):
    """The adapter's folder, config or weights do not exist."""


class AdapterCorrupt(AdapterError):
    """The adapter's files are damaged, hostile or self-contradictory."""


class AdapterUnsupported(AdapterError):
    """The adapter is valid for PEFT and uses something Graft refuses; the message names the field or tensor."""


class AdapterIncompatible(AdapterError):
    """The adapter does not fit this base model."""


class AdapterNameInvalid(AdapterError):
    """The name cannot be an adapter's name."""


class AdapterNameTaken(AdapterError):
    """Another adapter, or the base model, already answers to this name."""


class AdapterChanged(AdapterError):
    """The adapter's files are no longer those that were loaded."""


class AdapterMemoryExceeded(AdapterError):
    """The adapter alone is larger than `adapter_memory_bytes`."""


class ObjectNotFound(GraftError, LookupError):
    """A file or job that a server does not have."""


class TrainingDataError(GraftError, ValueError):
    """Rows that nothing can be learnt from; the message lists file, line and reason."""


class TrainingFailed(GraftError, RuntimeError):
    """A training job cannot go on."""


class PublishFailed(GraftError, RuntimeError):
    """A server did not load what was trained; the adapter is on disk all the same."""


class RemoteError(GraftError, RuntimeError):
    """A server that was asked over HTTP refused, failed or cannot be reached. `code` is that of its error, if it sent
    one."""

    def __init__(self, what: str, *, code: str | None = None, got: object = None, do: str | None = None) -> None:
        super().__init__(what, got=got, do=do)
        self.code = code


class EngineClosed(GraftError, RuntimeError):
    """The engine was shut down."""


class DrainFailed(GraftError, RuntimeError):
    """A worker's layers, or a replica, cannot go anywhere else; it has stayed."""


class StepFailed(GraftError, RuntimeError):
    """The engine failed, or ran out of memory, in the step that computed this request."""


class EngineOverloaded(GraftError, RuntimeError):
    """Too many requests are waiting. `retry_after_seconds` estimates when there will be room."""

    def __init__(
        self,
        what: str,
        *,
        retry_after_seconds: int,
        got: object = None,
        allowed: str | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, got=got, allowed=allowed, do=do)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(GraftError, TimeoutError):
    """A request was not answered within its timeout; the work on it was stopped."""
