"""Which adapters answer to which names, and for how long they are needed. Knows names, versions and holds; knows
nothing of weights or requests.

A name leads to an immutable adapter, and may come to lead to another. A request takes a hold on the adapter itself, so
that it ends with the one it began with. Every method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from graftlm.adapters.adapter import Adapter
from graftlm.adapters.folder import AdapterFolder
from graftlm.adapters.name import check_name
from graftlm.adapters.weighted import combine, is_weighted, parse_weighted
from graftlm.errors import AdapterNameTaken, ModelNotFound


class AdapterRegistry:
    """Adapters by name.

    Args:
        base_name: the base model's name, which no adapter may take.
        folder: adapters that answer to their folders' names before anybody has read them.
        forget: called with a digest that neither a name nor a hold needs any longer.
    """

    def __init__(self, *, base_name: str, forget: Callable[[str], None], folder: AdapterFolder | None = None) -> None:
        self._base_name = base_name
        self._folder = folder
        self._forget = forget
        self._by_name: dict[str, Adapter] = {}
        self._users: Counter[str] = Counter()
        self._lock = threading.RLock()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """A snapshot of what has been read: name -> adapter."""
        with self._lock:
            return dict(self._by_name)

    @property
    def names(self) -> list[str]:
        """All names that answer: adapters that have been read, then those that only lie in the folder."""
        known = self.adapters
        return [*known, *(name for name in self._in_folder() if name not in known)]

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Raise unless a new adapter may take `name`.

        Args:
            replace: another adapter may have it already.

        Raises:
            AdapterNameInvalid, AdapterNameTaken
        """
        check_name(name)
        if name == self._base_name:
            raise AdapterNameTaken("the base model already has this name", got=name, do="choose another")
        if not replace and self.answers_to(name):
            raise AdapterNameTaken(
                "another adapter already has this name", got=name, do="unload it first, replace it, or choose another"
            )

    def add(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Let an adapter answer to its name from now on. The one that did before is kept for those that hold it.

        Raises:
            AdapterNameInvalid, AdapterNameTaken
        """
        with self._lock:
            self.check_name(adapter.name, replace=replace)
            self._admit(adapter)

    def introduce(self, adapter: Adapter) -> None:
        """Note what has been read from the folder, unless its name leads to something already."""
        with self._lock:
            if adapter.name not in self._by_name:
                self._admit(adapter)

    def remove(self, name: str) -> Adapter:
        """Take a name away from the adapter that is returned. Those that hold it go on with it.

        Raises:
            ModelNotFound
        """
        with self._lock:
            if name not in self._by_name:
                raise self._not_found(name)
            adapter = self._by_name.pop(name)
            self._drop(adapter.digest)
            return adapter

    def drop_version(self, adapter: Adapter) -> None:
        """Forget what was read of an adapter in the folder, so that it is read anew when it is asked for again.

        Other adapters keep their names: whoever loaded them decides.
        """
        with self._lock:
            lies_in_folder = self._folder is not None and self._folder.holds(adapter)
            if lies_in_folder and self._by_name.get(adapter.name) is adapter:
                self.remove(adapter.name)

    def has_read(self, name: str) -> bool:
        """Whether the adapter of this name is known beyond its name."""
        return name in self._by_name

    def answers_to(self, name: str) -> bool:
        """Whether an adapter has this name, read or not."""
        return name in self._by_name or (self._folder is not None and self._folder.locate(name) is not None)

    def resolve(self, model: str, *, may_use: Callable[[str], bool] = lambda name: True) -> str | None:
        """The adapter, or weighted sum of adapters, that a request's model name means; None for the base.

        Args:
            may_use: names for which it is false do not answer.

        Raises:
            ModelNotFound: lists the names that would have been answered.
            InvalidRequest: it looks like a weighted sum and is none.
        """
        if model == self._base_name and may_use(model):
            return None
        for name in names_in(model):
            if not may_use(name) or not self.answers_to(name):
                raise self._not_found(name).told_to(may_use)
        return model

    def acquire(self, model: str) -> Adapter:
        """The adapter of this name, or the sum that `a:0.7+b:0.3` stands for, held until `release`.

        Raises:
            ModelNotFound, InvalidRequest, AdapterUnsupported
        """
        with self._lock:
            if is_weighted(model):
                adapter = combine(model, [(self.get(name), weight) for name, weight in parse_weighted(model).items()])
            else:
                adapter = self.get(model)
            self.hold(adapter)
            return adapter

    def hold(self, adapter: Adapter) -> None:
        """Need an adapter, and the parts of a sum, once more."""
        with self._lock:
            for digest in _digests(adapter):
                self._users[digest] += 1

    def release(self, adapter: Adapter) -> None:
        """Give one hold back."""
        with self._lock:
            for digest in _digests(adapter):
                self._drop(digest)

    def get(self, name: str) -> Adapter:
        """The adapter of this name, which has been read, without holding it.

        Raises:
            ModelNotFound
        """
        adapter = self._by_name.get(name)
        if adapter is None:
            raise self._not_found(name)
        return adapter

    def num_users(self, digest: str) -> int:
        """How many names and holds need this content."""
        return self._users[digest]

    def _admit(self, adapter: Adapter) -> None:
        self._users[adapter.digest] += 1
        replaced = self._by_name.pop(adapter.name, None)
        self._by_name[adapter.name] = adapter
        if replaced is not None:
            self._drop(replaced.digest)

    def _drop(self, digest: str) -> None:
        self._users[digest] -= 1
        if self._users[digest] == 0:
            del self._users[digest]
            # Under the lock, or somebody else could come to need it in between.
            self._forget(digest)

    def _in_folder(self) -> list[str]:
        return [] if self._folder is None else [name for name in self._folder.names() if name != self._base_name]

    def _not_found(self, name: str) -> ModelNotFound:
        return ModelNotFound(name, [self._base_name, *self.names])


def names_in(model: str) -> list[str]:
    """The adapters that a model name speaks of: itself, or the parts of a weighted sum.

    Raises:
        InvalidRequest: it looks like a weighted sum and is none.
    """
    return list(parse_weighted(model)) if is_weighted(model) else [model]


def _digests(adapter: Adapter) -> list[str]:
    return [adapter.digest, *(part.digest for part, _ in adapter.parts)]
