"""A thread for work that should take only what the engine's steps leave of the machine."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

# A tenth of the share of a thread of usual priority. Not the lowest: a thread that holds the interpreter while the rest
# of the machine is busy must get on, too.
NICENESS = 10


def background_thread(name: str) -> ThreadPoolExecutor:
    """One thread that runs what is submitted in turn; threads that libraries start from it have its priority.

    Only on Linux a thread can have a priority of its own; elsewhere it has the process's.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=_give_way)


def _give_way() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))
