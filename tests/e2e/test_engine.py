"""One real vLLM engine behind the pool, beside transformers as the second source: tokens, log-probs, weight
updates.

The engine of a model with tied embeddings runs with TP 1, the one with untied ones with TP 2 (its vocabulary
of 100 is padded to 128 by vLLM); the other two combinations are in the full tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.engines import PROMPT, Served, ask, serving

pytestmark = pytest.mark.usefixtures("_ray")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, _ray: None) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("tied"), family="qwen2", tied=True, tp=1) as served:
        yield served


def check_updates(served: Served) -> None:
    """Greedy tokens and log-probs are transformers' before and after each of two updates, which change them."""
    firsts = []
    for version in range(3):
        if version:
            served.loop.run(served.pool.update(served.publish(version)))
        first = served.generate(ask(f"v{version}", temperature=0.0))[0]
        assert first.cached_tokens == 0  # nothing of the old version's cache is left
        assert first.policy_version == version
        assert first.token_ids.tolist() == served.greedy(24)[: len(first.token_ids)]
        assert served.gap(f"v{version}") <= 1e-4
        firsts.append(first)
    for before, after in ((firsts[0], firsts[1]), (firsts[1], firsts[2])):
        assert abs(before.logprobs[0] - after.logprobs[0]) > 1e-2


def test_tied_tp1(tied: Served) -> None:
    check_updates(tied)


def test_a_dropped_or_misshapen_tensor_is_refused_and_the_old_version_serves(tied: Served) -> None:
    old = tied.publish(3)
    tied.loop.run(tied.pool.update(old))
    lost = "model.layers.1.self_attn.v_proj.weight"
    tensors = load_file(old.image)
    bad = replace(old, image=str(tied.folder / "bad.safetensors"), version=4)
    for change, says in (
        ({lost: None}, f"lacks {lost}"),
        ({"model.extra.weight": tensors[lost].clone()}, r"must not have model\.extra\.weight"),
        ({lost: tensors[lost][:-1].clone()}, rf"{lost} must have shape \(64, 128\), got \(63, 128\)"),
    ):
        save_file({n: t for n, t in (tensors | change).items() if t is not None}, bad.image)
        with pytest.raises(ValueError, match=says):
            tied.loop.run(tied.pool.update(bad))
    save_file(tensors, bad.image)
    with pytest.raises(
        ValueError, match="names of version 4: lacks model.norm.weight"
    ):
        tied.loop.run(tied.pool.update(replace(bad, names=bad.names[:-1])))
    assert tied.generate(ask("after refusals"))[0].policy_version == 3
    assert tied.gap("after refusals") <= 1e-4
    assert len(tied.made) == 1  # nothing was restarted


def test_shared_prefixes_come_from_the_cache(tied: Served) -> None:
    fresh = PROMPT[::-1].copy()
    first, again = (tied.generate(ask(f"prefix {i}", prompt_ids=fresh, route="prefix"))[0] for i in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 64)  # two whole blocks of 32 of 80 tokens
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert np.array_equal(first.logprobs, again.logprobs)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(tied: Served) -> None:
    seeds = range(8)
    alone = [tied.generate(ask(f"alone {s}", s))[0] for s in seeds]
    batch = tied.generate(*(ask(f"batch {s}", s) for s in reversed(seeds)))[::-1]
    for one, other in zip(alone, batch, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.array_equal(one.logprobs, other.logprobs)
    assert len({tuple(one.token_ids) for one in alone}) == len(seeds)


def test_ends_of_a_turn_are_kept(tied: Served) -> None:
    """The stop string's tokens and the end-of-sequence token (id 2) are part of what was sampled."""
    free = tied.generate(*(ask(f"free {s}", s, max_tokens=48) for s in range(32)))
    assert {r.finish for r in free} == {"stop", "length"}
    for result in free:
        ended = 2 in result.token_ids
        assert result.finish == ("stop" if ended else "length")
        assert (
            result.token_ids.tolist().index(2) == len(result.token_ids) - 1
            if ended
            else len(result.token_ids) == 48
        )
    seed, long = next((s, r) for s, r in enumerate(free) if r.finish == "length")
    visible = next(i for i in range(8, 40) if all(5 <= t < 99 for t in long.token_ids[i : i + 2]))
    text = "".join(chr(28 + t) for t in long.token_ids[visible : visible + 2])  # id 5 is "!" (33)
    stopped = tied.generate(ask("stop", seed, max_tokens=48, stop=(text,)))[0]
    assert stopped.finish == "stop"
    assert stopped.token_ids.tolist() == long.token_ids[: visible + 2].tolist()
    assert np.array_equal(stopped.logprobs, long.logprobs[: visible + 2])


def test_log_probs_are_after_temperature(tied: Served) -> None:
    result = tied.generate(ask("cool", 3, temperature=0.5))[0]
    import torch

    ids = torch.from_numpy(np.concatenate([PROMPT, result.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = (tied.model(ids[None]).logits[0, :-1] / 0.5).log_softmax(-1)
    own = logprobs.gather(1, ids[1:, None])[len(PROMPT) - 1 :, 0].numpy()
    assert np.abs(own - result.logprobs).max() <= 1e-4


def test_a_request_that_does_not_fit_is_the_callers_error(tied: Served) -> None:
    with pytest.raises(ValueError, match="513"):
        tied.generate(ask("too long", prompt_ids=np.full(513, 7, np.int32)))
    assert len(tied.made) == 1


def test_an_update_during_a_request_costs_nothing(tied: Served) -> None:
    """Requests in flight end under one version, each: the old one's, or sampled again under the new one."""
    published = tied.publish(9)

    async def story() -> list:
        requests = [
            asyncio.create_task(tied.pool(ask(f"meanwhile {s}", s, max_tokens=200))) for s in range(8)
        ]
        await asyncio.sleep(0.2)
        await tied.pool.update(published)
        return await asyncio.gather(*requests)

    results = tied.loop.run(story())
    new = [(s, r) for s, r in enumerate(results) if r.policy_version == 9]
    assert new
    for seed, result in new:
        logprobs = tied.reference(np.concatenate([PROMPT, result.token_ids]))[1][len(PROMPT) - 1 :]
        assert np.abs(logprobs - result.logprobs).max() <= 1e-4
        assert len(result.token_ids) == 200 or result.finish == "stop", seed


def test_untied_tp2(tmp_path: Path) -> None:
    with serving(tmp_path, family="llama", tied=False, tp=2, vocab_size=101) as served:
        check_updates(served)


@pytest.mark.full
@pytest.mark.parametrize(("family", "tied_head", "tp"), [("qwen2", True, 2), ("llama", False, 1)])
def test_other_combinations(tmp_path: Path, family: str, tied_head: bool, tp: int) -> None:
    with serving(tmp_path, family=family, tied=tied_head, tp=tp, vocab_size=101) as served:
        check_updates(served)
