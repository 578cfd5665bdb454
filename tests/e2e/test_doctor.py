"""Doctor on this machine, with the real packages: what set-up installs passes."""

from __future__ import annotations

import pytest

from megatron_tree import doctor


@pytest.mark.full
def test_this_machine():
    rows = {row.name: row for row in doctor.report()}
    assert [row.name for row in rows.values() if row.status == "wrong"] == []
    assert rows["publish"].why == "vLLM knows the plug-in megatron_tree_image"
    assert rows["attention"].value == "node"
    assert rows["process group"].value == (
        "gloo" if "gpu" in rows and rows["gpu"].value == "none" else "nccl"
    )
