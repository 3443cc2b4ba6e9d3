"""Masks of next tokens, computed while the model computes the logits they are for. Knows grammars, but no tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from graftlm.engine.request import Request

# Whoever brings a slow grammar takes one of them. llguidance computes outside of the interpreter's lock.
_NUM_THREADS = 4
# How long a step waits for masks if others could go on, and if nobody could. Usual masks take less than 1 ms, the first
# visit of a part of a grammar may take ten.
_PATIENCE_SECONDS, _PATIENCE_ALONE_SECONDS = 0.02, 0.5

# By the id of the request.
Masks = Mapping[str, Future[bytes]]


class MaskThreads:
    """Threads that compute masks beside a step."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="graft-masks")

    def begin(self, requests: Collection[Request]) -> Masks:
        """Begin with the masks of those requests that have a grammar; one that has been begun with goes on."""
        return {
            request.request_id: request.grammar.begin_mask(self._threads)
            for request in requests
            if request.grammar is not None
        }

    def close(self) -> None:
        """Begin with no more; what is being computed is finished first."""
        self._threads.shutdown(cancel_futures=True)


def late(masks: Masks, *, num_others: int) -> set[str]:
    """Whose masks are not there when the logits are, nor soon after.

    Args:
        num_others: how many others wait for the step to end.
    """
    if not num_others:
        wait(masks.values(), _PATIENCE_ALONE_SECONDS, return_when=FIRST_COMPLETED)
    wait(masks.values(), _PATIENCE_SECONDS)
    return {request_id for request_id, mask in masks.items() if not mask.done()}
