"""Model shapes and layouts that fit each other, drawn for property-based tests."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_tree.layout import ParallelLayout
from megatron_tree.reshard.names import FAMILIES, ModelShape


def small_shape(**changes: object) -> ModelShape:
    """Two layers of a tied Llama: 4 heads of 2 in 2 KV groups, hidden 3, ffn 8, 10 words."""
    fields: dict[str, object] = {
        "family": "llama",
        "num_layers": 2,
        "hidden": 3,
        "ffn": 8,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 2,
        "vocab": 10,
        "tied": True,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_positions": 64,
    }
    return ModelShape(**(fields | changes))  # type: ignore[arg-type]


@st.composite
def shapes_and_layouts(draw: st.DrawFn) -> tuple[ModelShape, ParallelLayout]:
    """GQA with tp below and above the KV heads, vocabularies that tp does not divide, all families, tied or
    not, stages equal and uneven, with and without virtual ones."""
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    rows = (heads + 2 * kv_heads) * head_dim
    fits = [
        tp
        for tp in range(1, 9)
        if heads % tp == 0 and rows % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    ]
    tp, pp = draw(st.sampled_from(fits)), draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    uneven = draw(st.booleans())
    layers = st.lists(st.integers(0, 2), min_size=pp * vpp, max_size=pp * vpp).filter(any)
    split = tuple(draw(layers)) if uneven else None
    shape = small_shape(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        num_layers=sum(split) if split else pp * vpp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 5)),
        ffn=tp * draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=draw(st.integers(1, 20) | st.sampled_from([130, 320, 400])),  # padded: 64, 192, 320, 448
        tied=draw(st.booleans()),
    )
    dp, cp = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return shape, ParallelLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp, stage_split=split)


def engine_tps(shape: ModelShape) -> list[int]:
    """The engine sizes up to 8 that vLLM accepts for a model."""
    padded = -(-shape.vocab // 64) * 64
    return [
        tp
        for tp in range(1, 9)
        if not (shape.heads % tp or shape.ffn % tp or padded % tp)
        and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    ]
