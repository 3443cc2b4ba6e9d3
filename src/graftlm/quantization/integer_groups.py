"""How the columns of stored integer codes fall into groups."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.disagreements import Disagreements
from graftlm.quantization.stored_module import StoredModule

INDEX_DTYPES = (torch.int32, torch.int64)


def consecutive_groups(
    module: StoredModule,
    role: str,
    *,
    columns: int,
    num_groups: int,
    group_size: int | None,
    disagreements: Disagreements,
) -> ColumnGroups:
    """Groups of `group_size` columns, the config's; of equal size where that does not give as many as there are scales.

    role: the tensor of the scales, for messages. group_size: -1 for one group.

    Raises:
        CheckpointError: no group size gives `num_groups`.
    """
    asked = columns if group_size == -1 else group_size
    if asked is not None and -(-columns // asked) == num_groups:
        return ColumnGroups(columns=columns, size=asked)
    if num_groups == 0 or columns % num_groups:
        raise module.misshapen(
            role, f"groups that divide the {columns} inputs; the config's group_size is {group_size}"
        )
    size = columns // num_groups
    if asked is not None:
        disagreements.tell("group_size", module.path, config=group_size, tensors=size)
    return ColumnGroups(columns=columns, size=size)


def read_group_index(module: StoredModule, role: str, *, columns: int, num_groups: int) -> Tensor | None:
    """The group of each column, int32 [columns]; None where there is no such tensor or it is blank.

    All zeros and all -1 are what libraries leave in it when it was never filled.
    Source: AutoGPTQ 0.7, autogptq_post_init in modeling/_utils.py; compressed-tensors 0.9, _process_quantization in
    quantization/lifecycle/forward.py.

    Raises:
        CheckpointError: it is misshapen, or names a group that does not exist.
    """
    if not module.has(role):
        return None
    index = module.read(role, dtypes=INDEX_DTYPES, shapes=[(columns,)])
    low, high = int(index.min()), int(index.max())
    if low == high and low in (0, -1):
        return None
    if low < 0 or high >= num_groups:
        raise CheckpointError(
            f"tensor {module.name(role)} names groups that have no scales",
            got=f"{low} to {high}",
            allowed=f"0 to {num_groups - 1}",
        )
    return index.to(torch.int32)


def read_column_groups(
    module: StoredModule,
    index_role: str,
    scale_role: str,
    *,
    columns: int,
    num_groups: int,
    group_size: int | None,
    disagreements: Disagreements,
) -> ColumnGroups:
    """The groups by a stored index where there is one, else consecutive.

    Raises:
        CheckpointError: as `read_group_index` and `consecutive_groups`.
    """
    index = read_group_index(module, index_role, columns=columns, num_groups=num_groups)
    if index is None:
        return consecutive_groups(
            module,
            scale_role,
            columns=columns,
            num_groups=num_groups,
            group_size=group_size,
            disagreements=disagreements,
        )
    size = max(1, int((index == 0).sum()))
    in_order = torch.equal(index, torch.arange(columns, dtype=torch.int32, device=index.device) // size)
    if group_size is not None and size != (columns if group_size == -1 else min(group_size, columns)):
        disagreements.tell("group_size", module.path, config=group_size, tensors=size)
    return ColumnGroups(columns=columns, size=size, index=None if in_order else index)
