"""The known families by `model_type`. To add one: a file beside this, a row here, a parameter in tests/parity."""

from graftlm.models.families.llama import LLAMA
from graftlm.models.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA,)}
