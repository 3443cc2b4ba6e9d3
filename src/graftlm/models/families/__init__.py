"""The known families by `model_type`. To add one: a file beside this, a row here, a parameter in tests/parity."""

from graftlm.models.families.bloom import BLOOM
from graftlm.models.families.falcon import FALCON
from graftlm.models.families.gemma import GEMMA
from graftlm.models.families.gemma2 import GEMMA2
from graftlm.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from graftlm.models.families.gemma4 import GEMMA4, GEMMA4_TEXT
from graftlm.models.families.gpt2 import GPT2
from graftlm.models.families.gpt_bigcode import GPT_BIGCODE
from graftlm.models.families.gpt_neox import GPT_NEOX
from graftlm.models.families.gpt_oss import GPT_OSS
from graftlm.models.families.llama import LLAMA
from graftlm.models.families.mistral import MISTRAL
from graftlm.models.families.mixtral import MIXTRAL
from graftlm.models.families.olmo2 import OLMO2
from graftlm.models.families.opt import OPT
from graftlm.models.families.phi import PHI
from graftlm.models.families.phi3 import PHI3
from graftlm.models.families.qwen2 import QWEN2
from graftlm.models.families.qwen3 import QWEN3
from graftlm.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from graftlm.models.families.smollm3 import SMOLLM3
from graftlm.models.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        BLOOM,
        FALCON,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3_TEXT,
        GEMMA4,
        GEMMA4_TEXT,
        GPT2,
        GPT_BIGCODE,
        GPT_NEOX,
        GPT_OSS,
        LLAMA,
        MISTRAL,
        MIXTRAL,
        OLMO2,
        OPT,
        PHI,
        PHI3,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        SMOLLM3,
    )
}
_GEMMA_3N = "its four residual streams and sparse feed-forward layers are not what Graft's decoder computes"
# Known, and why not served.
REFUSED: dict[str, str] = {"gemma3n": _GEMMA_3N, "gemma3n_text": _GEMMA_3N}
