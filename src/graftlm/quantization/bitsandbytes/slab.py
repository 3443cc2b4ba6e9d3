"""How much of a matrix is quantised at once."""

from __future__ import annotations

# A handful of float32 copies of a slab live together while its codes are found: 20 MB.
SLAB_ELEMENTS = 1 << 20
