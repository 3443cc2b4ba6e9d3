"""The known families by `model_type`. To add one: a file beside this, a row here, a parameter in tests/parity."""

from graftlm.models.families.gpt2 import GPT2
from graftlm.models.families.gpt_bigcode import GPT_BIGCODE
from graftlm.models.families.llama import LLAMA
from graftlm.models.families.opt import OPT
from graftlm.models.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        GPT_BIGCODE,
        LLAMA,
        OPT,
    )
}
