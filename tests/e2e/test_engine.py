"""One real vLLM engine behind the pool, beside transformers as the second source: tokens, log-probs, weight
updates.

The engine of a model with tied embeddings runs with TP 1. The other combinations (vLLM pads their vocabulary
of 101 to 128) are in the full tests; of them test_run has an untied one with TP 2, beside the trainer.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.torch import load_file, save_file

from megatron_tree.engine.engine import Engine
from megatron_tree.engine.handle import EngineDied
from megatron_tree.types import GenerateResult, Update
from tests.e2e.engines import PROMPT, Served, ask, serving
from tests.tiny_models import make_tokenizer

pytestmark = pytest.mark.usefixtures("_ray")


def check_updates(served: Served) -> None:
    """Greedy tokens and log-probs are transformers' before and after each of two updates that change them."""
    firsts = []
    for step in range(3):
        if step:
            served.loop.run(served.pool.update(served.publish()))
        tag = f"v{served.version}"
        first = served.generate(ask(tag, temperature=0.0))[0]
        assert step == 0 or first.cached_tokens == 0  # nothing of the old version's cache is left
        assert first.policy_version == served.version
        assert first.token_ids.tolist() == served.greedy(24)
        assert served.gap(tag) <= 1e-4
        firsts.append(first)
    for before, after in pairwise(firsts):
        assert abs(before.logprobs[0] - after.logprobs[0]) > 1e-2


def test_tied_tp1(tied: Served) -> None:
    check_updates(tied)


def test_a_dropped_or_misshapen_tensor_is_refused(tied: Served) -> None:
    old, engines = tied.publish(), len(tied.made)
    tied.loop.run(tied.pool.update(old))
    tensors = load_file(old.image)
    bad = replace(old, image=str(tied.folder / "bad.safetensors"), version=1000)
    v_proj = "model.layers.1.self_attn.v_proj.weight"
    for change, says in (
        ({v_proj: None}, f"lacks {v_proj}"),
        ({"model.extra": tensors[v_proj].clone()}, r"must not have model\.extra"),
        ({v_proj: tensors[v_proj][:-1].clone()}, rf"{v_proj} must have shape \(64, 128\), got \(63, 128\)"),
    ):
        save_file({name: t for name, t in (tensors | change).items() if t is not None}, bad.image)
        with pytest.raises(ValueError, match=says):
            tied.loop.run(tied.pool.update(bad))
    save_file(tensors, bad.image)
    with pytest.raises(ValueError, match=r"names of version 1000: lacks model\.norm\.weight"):
        tied.loop.run(tied.pool.update(replace(bad, names=bad.names[:-1])))
    assert tied.generate(ask("after refusals"))[0].policy_version == old.version
    assert tied.gap("after refusals") <= 1e-4
    assert len(tied.made) == engines  # nothing was restarted


def test_a_flipped_byte_is_refused(tied: Served) -> None:
    """One bit of the image after its owner digested it: named, nothing loaded, the old version serves."""
    old, engines = tied.version, len(tied.made)
    before = tied.generate(ask("before the flip", 5))[0]
    update = tied.publish()
    with Path(update.image).open("r+b") as file:
        file.seek(-1, 2)  # the last byte of the last tensor
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=r"model\.\S+ at \(0.*\) is not what rank 0 wrote"):
        tied.loop.run(tied.pool.update(update))
    after = tied.generate(ask("after the flip", 5))[0]
    assert after.policy_version == before.policy_version == old
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert len(tied.made) == engines
    tied.loop.run(tied.pool.update(tied.publish()))  # the reference model and the engine agree again


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
    decode = make_tokenizer().decode
    text, end = next(
        (text, i + 2)
        for i in range(8, 40)
        if (text := decode(long.token_ids[i : i + 2])) not in decode(long.token_ids[: i + 1])
        and all(5 <= t < 99 for t in long.token_ids[i : i + 2])  # printable characters
    )
    stopped = tied.generate(ask("stop", seed, max_tokens=48, stop=(text,)))[0]
    assert stopped.finish == "stop"
    assert stopped.token_ids.tolist() == long.token_ids[:end].tolist()
    assert np.array_equal(stopped.logprobs, long.logprobs[:end])


def test_log_probs_are_after_temperature(tied: Served) -> None:
    result = tied.generate(ask("cool", 3, temperature=0.5))[0]
    assert np.abs(tied.sampled(result, 0.5) - result.logprobs).max() <= 1e-4
    assert np.abs(tied.sampled(result) - result.logprobs).max() > 1e-2


def test_a_request_that_does_not_fit_is_the_callers_error(tied: Served) -> None:
    engines = len(tied.made)
    with pytest.raises(ValueError, match=r"request too long: .*length 513"):
        tied.generate(ask("too long", prompt_ids=np.full(513, 7, np.int32)))
    assert len(tied.made) == engines


def test_an_update_during_requests_costs_none(tied: Served) -> None:
    """Each ends wholly under one version: the old one's, or sampled again under the new one."""
    old = tied.generate(*(ask(f"before {s}", s, max_tokens=200) for s in range(8)))
    update = tied.publish()

    async def story() -> list[GenerateResult]:
        tasks = [asyncio.create_task(tied.pool(ask(f"meanwhile {s}", s, max_tokens=200))) for s in range(8)]
        await asyncio.sleep(0.2)
        await tied.pool.update(update)
        return await asyncio.gather(*tasks)

    results = tied.loop.run(story())
    assert any(result.policy_version == update.version for result in results)
    for result, before in zip(results, old, strict=True):
        if result.policy_version == update.version:
            assert np.abs(tied.sampled(result) - result.logprobs).max() <= 1e-4
        else:
            assert result.token_ids.tolist() == before.token_ids.tolist()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "tied_head", "tp"), [("qwen2", True, 2), ("llama", False, 1), ("llama", False, 2)]
)
def test_other_combinations(tmp_path: Path, family: str, tied_head: bool, tp: int) -> None:
    with serving(tmp_path, family=family, tied=tied_head, tp=tp, vocab_size=101) as served:
        check_updates(served)


class Careless(Engine):
    """Loads whatever it is told to, so that what the loader itself notices shows."""

    async def check(self, update: Update) -> None:
        pass


@pytest.mark.full
def test_a_part_of_a_layer_is_noticed_while_loading(tied: Served) -> None:
    """vLLM's layer-wise loader takes a layer without its `v_proj` in silence and computes something else.

    q, k and v are 128, 64 and 64 rows of 128 and as many biases: 33,024 elements, 64 * 128 fewer without v's
    rows.
    """
    whole = tied.publish()
    tied.loop.run(tied.pool.update(whole))
    v_proj = "model.layers.1.self_attn.v_proj.weight"
    tensors = load_file(whole.image)
    del tensors[v_proj]
    image = str(tied.folder / "partial.safetensors")
    save_file(tensors, image)
    actor = ray.remote(Careless).options(num_cpus=0).remote(str(tied.folder), tied.pool.config)
    ray.get(actor.start.remote(whole))
    partial = replace(whole, image=image, names=tuple(tensors))
    with pytest.raises(EngineDied, match=r"layer model\.layers\.1\.self_attn\.qkv_proj: got 24832 of 33024"):
        ray.get(actor.update.remote(partial))
    with pytest.raises(EngineDied, match="the update to version"):
        ray.get(actor.score.remote("after", PROMPT))
    ray.kill(actor)
