"""Which models' numbers are kept apart, when there are more models than is good for a table. Knows names and counts."""

from __future__ import annotations

from collections import Counter

OTHER = "other"
# Uses are remembered of so many names for each that is kept apart, and halved when there are more.
_REMEMBERED = 16


class ModelLabels:
    """The most used models by name; all others are one, `OTHER`.

    A newcomer takes the place of the least used when it has been used more often than that one. What is only known of
    has a place as long as there are enough.

    Args:
        limit: how many are kept apart.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._labels: set[str] = set()
        self._uses: Counter[str] = Counter()

    def use(self, name: str) -> tuple[str, str | None]:
        """Note that a model is used.

        Returns: its label, and the name that is no label any more because of it.
        """
        self._uses[name] += 1
        if len(self._uses) > _REMEMBERED * self._limit:
            self._forget()
        if name in self._labels:
            return name, None
        if len(self._labels) < self._limit:
            self._labels.add(name)
            return name, None
        least = min(self._labels, key=lambda label: self._uses[label])
        if self._uses[name] <= self._uses[least]:
            return OTHER, None
        self._labels.remove(least)
        self._labels.add(name)
        return name, least

    def know(self, name: str) -> str:
        """Note that there is a model, which is no use of it.

        Returns: its label.
        """
        if len(self._labels) < self._limit:
            self._labels.add(name)
        return self.label(name)

    def label(self, name: str) -> str:
        """The label of a model that is in use."""
        return name if name in self._labels else OTHER

    def _forget(self) -> None:
        self._uses = Counter({name: uses // 2 for name, uses in self._uses.items() if uses > 1})
