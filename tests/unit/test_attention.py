"""Every back end against a dense mask, `j <= i < subtree_end[j]` written out, over random packed trees.

Forward and gradients in double precision where a kernel takes it, so that equality means exactness.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from megatron_tree.layout import ParallelLayout
from megatron_tree.train import backends
from megatron_tree.train.tree_mask import BLOCK, TreeMask

HEADS = [(4, 4), (4, 2), (3, 1)]  # query heads, key and value heads


def pack(parents: list[int], lengths: list[int], padding: int) -> np.ndarray:
    """subtree_end of a forest whose nodes are in depth-first order (parent -1: a root), then padding."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ends = list(range(1, len(parents) + 1))  # in nodes
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
    own = np.repeat(starts[ends], lengths) if parents else np.zeros(0, dtype=np.int64)
    return np.concatenate([own, starts[-1] + 1 + np.arange(padding)]).astype(np.int64)


@st.composite
def packs(draw: st.DrawFn, multiple: int = 1) -> np.ndarray:
    """Forests of up to 12 nodes of 1 to 9 tokens: each next node hangs on the last one's path, or is a
    root."""
    count = draw(st.integers(1, 12))
    parents = [-1]
    for node in range(1, count):
        path = [node - 1]
        while path[-1] >= 0:
            path.append(parents[path[-1]])
        parents.append(draw(st.sampled_from(path)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    padding = draw(st.integers(0, 5))
    return pack(parents, lengths, padding + -(sum(lengths) + padding) % multiple)


SHAPES = {
    "single node": pack([-1], [7], 0),
    "one token": pack([-1], [1], 0),
    "deep chain": pack([-1, 0, 1, 2, 3, 4], [3, 1, 4, 1, 5, 9], 0),
    "wide fan": pack([-1] + [0] * 9, [5] + [2] * 9, 2),
    "several trees": pack([-1, 0, 0, -1, 3, 4, 3, -1], [4, 2, 3, 1, 2, 6, 5, 3], 1),
    "only padding": pack([], [], 4),
}


def dense_mask(end: np.ndarray) -> Tensor:
    i, j = np.arange(len(end))[:, None], np.arange(len(end))[None]
    return torch.from_numpy((j <= i) & (i < end[None]))


def inputs(tokens: int, heads: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, count, 8, generator=generator, dtype=dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


def dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention by its definition."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), value)


def emulated_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """The contract of `torch.nn.attention.varlen.varlen_attn`: each sequence by itself, causal from the
    bottom right."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_k[-1]) == len(key)
    lengths = [cu.diff().tolist() for cu in (cu_seq_q, cu_seq_k)]
    assert [max(length) for length in lengths] == [max_q, max_k]
    outs = []
    for q, k, v in zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True):
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        outs.append(dense(q, k, v, visible))
    return torch.cat(outs)


@pytest.fixture(autouse=True)
def _varlen_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", emulated_varlen)


def check(attend: backends.Attend, end: np.ndarray, heads: tuple[int, int], cp: int = 1) -> None:
    """Outputs of all context-parallel ranks and their summed gradients equal those of the dense mask."""
    query, key, value = inputs(len(end), heads)
    expected = dense(query, key, value, dense_mask(end))
    got = torch.empty_like(expected)
    for rank, here in enumerate(shares(len(end), cp)):
        mask = TreeMask.of(end, "cpu", cp=cp, cp_rank=rank)
        got[here] = attend(query[here], key, value, mask)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    by_hand, ours = (torch.autograd.grad(out, (query, key, value), grad) for out in (expected, got))
    torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", [backends.node, backends.varlen])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", HEADS)
def test_named_shapes_equal_a_dense_mask(attend: backends.Attend, shape: str, heads: tuple[int, int]):
    check(attend, SHAPES[shape], heads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", HEADS)
def test_node_off_a_cpu(shape: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """The products that stand in for the flash kernel elsewhere."""
    monkeypatch.setattr(backends, "_forward", backends._plain_forward)
    monkeypatch.setattr(backends, "_backward", backends._plain_backward)
    check(backends.node, SHAPES[shape], heads)


@settings(max_examples=60)
@given(end=packs(), heads=st.sampled_from(HEADS))
def test_node_equals_a_dense_mask(end: np.ndarray, heads: tuple[int, int]):
    check(backends.node, end, heads)


@settings(max_examples=40)
@given(end=packs(multiple=8), heads=st.sampled_from(HEADS), cp=st.sampled_from([2, 4]))
def test_node_over_context_parallel_ranks(end: np.ndarray, heads: tuple[int, int], cp: int):
    check(backends.node, end, heads, cp)


@settings(max_examples=40)
@given(end=packs(multiple=8), heads=st.sampled_from(HEADS), cp=st.sampled_from([1, 2, 4]))
def test_varlen_metadata_under_its_contract(end: np.ndarray, heads: tuple[int, int], cp: int):
    check(backends.varlen, end, heads, cp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_node_is_as_good_as_one_softmax_in_its_precision(dtype: torch.dtype):
    """Merging rectangles loses no more than a rounding of the output."""
    end = pack([-1, 0, 1, 0, 3, 3, 0], [90, 120, 60, 200, 33, 70, 41], 2)
    query, key, value = inputs(len(end), (4, 2), dtype)
    expected = dense(*(t.double() for t in (query, key, value)), dense_mask(end))
    got = backends.node(query, key, value, TreeMask.of(end, "cpu"))
    assert got.dtype == dtype
    bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert float((got - expected).abs().max()) < bound * float(expected.abs().max())


@settings(max_examples=10)
@given(end=packs(multiple=8), cp=st.sampled_from([1, 2, 4]))
def test_flex_equals_a_dense_mask(end: np.ndarray, cp: int):
    """torch's own FlexAttention, not compiled: it takes the mask's function and ignores the blocks."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(backends, "_compiled_flex", lambda: flex_attention)
        query, key, value = (t.detach() for t in inputs(len(end), (4, 2)))
        for rank, here in enumerate(shares(len(end), cp)):
            got = backends.flex(query[here], key, value, TreeMask.of(end, "cpu", cp=cp, cp_rank=rank))
            expected = dense(query, key, value, dense_mask(end))[here]
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(end=packs(multiple=8), cp=st.sampled_from([1, 2, 4]), scale=st.sampled_from([8, 41]))
def test_blocks_are_those_of_the_dense_mask(end: np.ndarray, cp: int, scale: int):
    """Each token `scale` times: every block with a visible pair is listed once, as full where all are."""
    end = np.repeat(end * scale, scale)
    end = np.maximum(end, np.arange(1, len(end) + 1))
    for rank, here in enumerate(shares(len(end), cp)):
        blocks = TreeMask.of(end, "cpu", cp=cp, cp_rank=rank).blocks
        visible = dense_mask(end)[here]
        for q, rows in enumerate(visible.split(BLOCK)):
            of = list(rows.split(BLOCK, dim=1))
            full = {k for k, part in enumerate(of) if part.all()}
            some = {k for k, part in enumerate(of) if part.any()} - full
            assert listed(blocks.full_kv_num_blocks, blocks.full_kv_indices, q) == sorted(full)
            assert listed(blocks.kv_num_blocks, blocks.kv_indices, q) == sorted(some)
        assert blocks.seq_lengths == visible.shape


@pytest.mark.full
def test_compiled_flex_equals_node():
    """The kernel that torch compiles for a CPU, over blocks that are partly seen, full and empty."""
    end = pack([-1, 0, 1, 0, 3, 3, 0, -1, 7], [90, 120, 60, 200, 33, 170, 41, 300, 200], 6)
    query, key, value = (t.detach() for t in inputs(len(end), (4, 2), torch.float32))
    mask = TreeMask.of(end, "cpu")
    assert mask.blocks.sparsity() > 30  # % of blocks that are skipped
    with torch.no_grad():
        got, expected = (attend(query, key, value, mask) for attend in (backends.flex, backends.node))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_flex_is_compiled_for_lengths_but_not_for_heads(monkeypatch: pytest.MonkeyPatch):
    """A new length needs no new kernel. Triton's takes the number of heads and their size as constants."""
    queries = []

    def capture(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
        queries.append(next(x.meta["example_value"].shape for x in inputs if "q" in x.name))
        return graph.forward

    compiled = torch.compile(flex_attention, backend=capture, dynamic=True, fullgraph=True)
    monkeypatch.setattr(backends, "_compiled_flex", lambda: compiled)
    for repeats in (50, 90, 130):
        end = pack([-1, 0, 1, 0], [repeats, 2 * repeats, 3 * repeats, 4 * repeats], 0)
        query, key, value = (t.detach() for t in inputs(len(end), (4, 2), torch.float32))
        backends.flex(query, key, value, TreeMask.of(end, "cpu"))
    assert len(queries) <= 2  # the first length may look like another size
    for batch, heads, length, dim in queries:
        assert [type(size) for size in (batch, heads, length, dim)] == [int, int, torch.SymInt, int]
        assert (batch, heads, dim) == (1, 4, 8)


def test_metadata_by_hand():
    """The example of MicroBatch, `p q a b c`, and the first of two context-parallel ranks of it padded to 8
    tokens: it has p q and, of the padding, the last two."""
    mask = TreeMask.of(np.array([5, 5, 4, 4, 5]), "cpu")
    assert [(p.start, p.stop, p.keys) for p in mask.pieces] == [
        (0, 4, ((0, 4),)),
        (4, 5, ((0, 2), (4, 5))),
    ]
    assert mask.parts.own == ((0, 4, 0), (4, 5, 4))
    assert mask.parts.ancestors == ((4, 5, 0, 2),)
    assert mask.sequences.key_index.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert mask.sequences.cu_keys.tolist() == [0, 4, 7]
    first = TreeMask.of(np.array([5, 5, 4, 4, 5, 6, 7, 8]), "cpu", cp=2)
    assert first.shares == (((0, 2), (6, 8)), ((2, 6),))
    assert first.parts.own == ((0, 2, 0), (2, 3, 6), (3, 4, 7))
    assert first.parts.ancestors == ()


def test_siblings_share_a_rectangle():
    """Three branches of one node: one rectangle over that node, whatever hangs below them."""
    mask = TreeMask.of(pack([-1, 0, 0, 2, 2, 0], [10, 3, 4, 5, 6, 7], 0), "cpu")
    assert mask.parts.ancestors == ((13, 35, 0, 10), (22, 28, 13, 17))
    assert len(mask.parts.own) == 4  # as many as leaves


@pytest.mark.parametrize("end", [[3, 2, 4, 4], [1, 1], [3, 3], [4, 4, 5, 5, 5]])
def test_overlapping_subtrees_are_refused(end: list[int]):
    with pytest.raises(AssertionError, match="subtree"):
        _ = TreeMask.of(np.array(end), "cpu").pieces


def test_which_back_end_a_device_gets():
    assert backends.choose("auto", "cpu", torch.float32)[0] == "node"
    assert backends.choose("auto", "cuda", torch.bfloat16)[0] == "flex"
    for name in ("node", "flex", "varlen"):
        assert backends.choose(name, "cuda:0", torch.bfloat16)[0] == name
    refused = {
        ("flex", "cpu", torch.float32): "must be auto or node on a CPU, where flex cannot train, got flex",
        ("varlen", "cpu", torch.bfloat16): "must be auto or node on a CPU",
        ("varlen", "cuda", torch.float32): "varlen needs model.dtype bf16, got fp32",
    }
    for (name, device, dtype), rule in refused.items():
        with pytest.raises(ValueError, match=f"^train.attention: {rule}"):
            backends.choose(name, device, dtype)


def shares(tokens: int, cp: int) -> list[Tensor]:
    layout = ParallelLayout(cp=cp)
    return [
        torch.cat([torch.arange(a, b) for a, b in layout.context_ranges(tokens, rank)]) for rank in range(cp)
    ]


def listed(counts: Tensor, indices: Tensor, row: int) -> list[int]:
    return indices[0, 0, row, : counts[0, 0, row]].tolist()
