"""Child processes end with the process that started them, however that one ends.

The kernel sends the signal: nothing has to be left alive to do it. It counts the death of the thread that
started the child, so children are started from threads that live as long as their process.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Asks the kernel to end this process with its parent, whose id is given."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def fork_only_mortals() -> None:
    """From here on, whatever this process forks, and those fork, ends with the one that forked it."""
    parent = 0

    def before() -> None:
        nonlocal parent
        parent = os.getpid()

    os.register_at_fork(before=before, after_in_child=lambda: die_with(parent))
