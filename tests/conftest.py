"""Limits of every test process: one thread, no hub, no usage reports.

Set before torch is imported anywhere, so that spawned ranks and engines inherit it. A run that wants more
threads sets OMP_NUM_THREADS itself.
"""

from __future__ import annotations

import os

import hypothesis

# a busy machine is no failure: pytest's time-out is the only clock
hypothesis.settings.register_profile("repository", deadline=None)
hypothesis.settings.load_profile("repository")

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)
