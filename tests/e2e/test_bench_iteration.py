"""The shares of `tools/bench_iteration.py`, on two iterations counted by hand."""

from __future__ import annotations

import asyncio

import pytest

from tools.bench_iteration import Calls, report


def record(scale: float) -> dict:
    """An iteration of 10 s: 5 growing, 2 scoring, 2 training, 0.5 publishing, 0.5 of neither."""
    seconds = {"grow": 5.0, "score": 2.0, "train": 2.0, "publish": 0.5, "iteration": 10.0}
    calls = {"requests": 40.0, "score": 1.5, "train": 1.8, "create_image": 0.1, "write_version": 0.1}
    return {
        **{f"time/{name}_s": scale * value for name, value in seconds.items()},
        "packing/unique_tokens": 1000.0,
        "engine/sampled_tokens": 600.0,
        "calls": {name: scale * value for name, value in (calls | {"engines update": 0.2}).items()},
    }


def test_shares_are_of_the_sums() -> None:
    found = report([record(1.0), record(3.0)])
    assert found["share"] == {"grow": 0.5, "score": 0.2, "train": 0.2, "publish": 0.05, "rest": 0.05}
    assert found["share_inside"] == {
        "score": {"ranks": 0.75, "driver": 0.25},
        "train": {"ranks": 0.9, "driver": 0.1},
        "publish": {"ranks write": 0.4, "engines update": 0.4, "driver": 0.2},
    }
    assert found["requests_in_flight_while_growing"] == 8.0
    assert (found["tokens_per_second"], found["tokens_per_second_of_train"]) == (50.0, 250.0)
    assert found["sampled_tokens_per_second_of_grow"] == 60.0
    assert (found["iteration_s"], found["iterations"]) == (20.0, 2)


def test_calls_are_timed_whether_they_succeed_or_not() -> None:
    async def fails() -> None:
        await asyncio.sleep(0.02)
        raise ValueError("refused")

    async def story(calls: Calls) -> None:
        assert await calls.timed("one", asyncio.sleep(0.01, "done")) == "done"
        with pytest.raises(ValueError, match="refused"):
            await calls.timed("two", fails())

    calls = Calls()
    asyncio.run(story(calls))
    assert calls.seconds["one"] >= 0.01
    assert calls.seconds["two"] >= 0.02
