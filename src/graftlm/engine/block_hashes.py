"""What a request's blocks contain, as hashes. No torch."""

from __future__ import annotations

import hashlib
from array import array

from graftlm.engine.block_pool import BlockHash
from graftlm.engine.request import Request
from graftlm.models.length_regimes import Regime


def extend_hashes(request: Request, block_size: int, regime: Regime) -> None:
    """Bring `request.block_hashes` up to its last full block.

    Keys and values follow from the tokens before them and from the adapter that computed them, so each hash covers its
    block's tokens, the hash before it, and the adapter's content digest: never its name, which may come to mean
    another. The first block's covers the request's salt: tenants with different salts share nothing. Up to its
    invocation an activated LoRA's blocks are those of whoever computes there, usually the base.

    Args:
        regime: what else the keys follow from, as long as the request stays in it.
    """
    hashes = request.block_hashes
    for index in range(len(hashes), request.num_tokens // block_size):
        start, stop = index * block_size, (index + 1) * block_size
        digest = request.dormant_digest if stop <= request.active_from else request.adapter_digest
        # Where in the block the adapter sets in: its rows before that are another's.
        onset = max(request.active_from - start, 0) if stop > request.active_from else 0
        content = hashlib.blake2b(hashes[-1] if hashes else repr((regime, request.cache_salt)).encode(), digest_size=16)
        content.update(f"{digest or ''} {onset} ".encode())
        content.update(array("q", request.tokens(start, stop)))
        hashes.append(BlockHash(content.digest()))
