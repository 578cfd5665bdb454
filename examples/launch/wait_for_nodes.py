"""Waits until the Ray cluster at RAY_ADDRESS has so many nodes: `wait_for_nodes.py NODES TIMEOUT_S`.

Ends with status 1 and one line that says how many came. Not here: what the nodes are used for (`cluster`).
"""

from __future__ import annotations

import logging
import signal
import sys
import time

import ray
from ray.exceptions import RaySystemError

PAUSE_S = 1.0


def num_nodes(wanted: int, deadline: float) -> int:
    """Nodes that are alive when `wanted` are, or at the deadline; 0 while the head does not answer."""
    while True:
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler aborts with a dump
            break
        except (ConnectionError, RaySystemError):
            if time.monotonic() > deadline:
                return 0
            time.sleep(PAUSE_S)
    while True:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive >= wanted or time.monotonic() > deadline:
            return alive
        time.sleep(PAUSE_S)


def main() -> int:
    wanted, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    alive = num_nodes(wanted, time.monotonic() + timeout_s)
    if alive < wanted:
        sys.stderr.write(
            f"MEGATRON_TREE_NODES: {wanted} nodes must join within {timeout_s:g} s, got {alive}\n"
        )
    return int(alive < wanted)


if __name__ == "__main__":
    sys.exit(main())
