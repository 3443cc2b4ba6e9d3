"""Which adapters answer to which names, and how much memory they hold. Knows names, bytes and holds; knows nothing of
requests or tensors.

A name leads to an immutable adapter. A request takes a hold on the adapter itself, so unloading a name never pulls
weights from under a running request: the memory returns with the last hold. Every method may be called from any thread.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping
from weakref import WeakValueDictionary

from graftlm.adapters.adapter import Adapter
from graftlm.adapters.weighted import combine, is_weighted, parse_weighted
from graftlm.errors import AdapterMemoryExceeded, AdapterNameInvalid, AdapterNameTaken, ModelNotFound

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_MAX_NAMES_SHOWN = 20


class AdapterRegistry:
    """Adapters by name within a byte budget.

    Args:
        base_name: the base model's name, which no adapter may take.
        max_bytes: memory for all adapters, those still held after their name is gone included.
    """

    def __init__(self, *, base_name: str, max_bytes: int) -> None:
        self._base_name = base_name
        self._max_bytes = max_bytes
        self._by_name: dict[str, Adapter] = {}
        self._holds: Counter[Adapter] = Counter()
        self._sums: WeakValueDictionary[str, Adapter] = WeakValueDictionary()
        self._lock = threading.RLock()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """A snapshot: name -> adapter."""
        with self._lock:
            return dict(self._by_name)

    @property
    def free_bytes(self) -> int:
        with self._lock:
            used = sum(adapter.num_bytes for adapter in {*self._by_name.values(), *self._holds})
        return self._max_bytes - used

    def check_name(self, name: str) -> None:
        """Raise unless a new adapter may take `name`.

        Raises:
            AdapterNameInvalid, AdapterNameTaken
        """
        if not isinstance(name, str) or _NAME.fullmatch(name) is None or ".." in name:
            raise AdapterNameInvalid(
                "this cannot be an adapter's name",
                got=repr(name)[:100],
                allowed="1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit, without '..'",
            )
        if name == self._base_name or name in self._by_name:
            owner = "the base model" if name == self._base_name else "another adapter"
            raise AdapterNameTaken(f"{owner} already has this name", got=name, do="unload it first, or choose another")

    def add(self, adapter: Adapter) -> None:
        """Let an adapter answer to its name.

        Raises:
            AdapterNameInvalid, AdapterNameTaken, AdapterMemoryExceeded
        """
        with self._lock:
            self.check_name(adapter.name)
            if adapter.num_bytes > self.free_bytes:
                raise AdapterMemoryExceeded(
                    f"adapter {adapter.name} does not fit in adapter_memory_bytes",
                    got=f"{adapter.num_bytes} bytes",
                    allowed=f"{self.free_bytes} of {self._max_bytes} bytes are free",
                    do="unload another adapter or raise adapter_memory_bytes",
                )
            self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Take a name away. Requests that hold its adapter go on with it.

        Raises:
            ModelNotFound
        """
        with self._lock:
            if self._by_name.pop(name, None) is None:
                raise self._not_found(name)

    def resolve(self, model: str) -> str | None:
        """The adapter, or weighted sum of adapters, that a request's model name means; None for the base.

        Raises:
            ModelNotFound: lists the names that would have been answered.
            InvalidRequest: it looks like a weighted sum and is none.
        """
        if model == self._base_name:
            return None
        for name in parse_weighted(model) if is_weighted(model) else [model]:
            if name not in self._by_name:
                raise self._not_found(name)
        return model

    def acquire(self, model: str) -> Adapter:
        """The adapter of this name, or the sum that `a:0.7+b:0.3` stands for, held until `release`.

        Raises:
            ModelNotFound, InvalidRequest, AdapterUnsupported
        """
        weights = parse_weighted(model) if is_weighted(model) else {model: 1.0}
        with self._lock:
            parts = [(self.get(name), weight) for name, weight in weights.items()]
            if not is_weighted(model):
                adapter = parts[0][0]
            else:
                # Equal sums share one set of tensors for as long as a request holds it.
                adapter = combine(model, parts)
                adapter = self._sums.setdefault(adapter.digest, adapter)
            for part in adapter.parts or (adapter,):
                self._holds[part] += 1
            return adapter

    def release(self, adapter: Adapter) -> None:
        """Give one hold back."""
        with self._lock:
            for part in adapter.parts or (adapter,):
                self._holds[part] -= 1
                if self._holds[part] == 0:
                    del self._holds[part]

    def get(self, name: str) -> Adapter:
        """The adapter of this name, without holding it.

        Raises:
            ModelNotFound
        """
        adapter = self._by_name.get(name)
        if adapter is None:
            raise self._not_found(name)
        return adapter

    def num_holds(self, adapter: Adapter) -> int:
        return self._holds[adapter]

    def _not_found(self, name: str) -> ModelNotFound:
        names = [self._base_name, *self.adapters]
        more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
        known = ", ".join(names[:_MAX_NAMES_SHOWN]) + more
        return ModelNotFound("no model answers to this name", got=repr(name)[:100], allowed=known)
