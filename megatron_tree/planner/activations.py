"""Bytes that autograd saves of one micro-batch on one trainer rank. Pure: shape, layout and tokens in.

Counted are unique storages, in the model of `train.model` with its layer spec. With h hidden, f ffn / tp, q
and kv the query and key columns of a rank, d the head dim, e bytes of an element; S the tokens of the
micro-batch, s = S / cp those of the rank, r = s, under sequence parallelism s / tp, a layer saves

    two norms         r (4 h + e h + 4) each: the input in fp32, the scaled input, the inverse root
    their outputs     r e h each, as inputs of linear_qkv and linear_fc1
    rotary tables     s 4 e d: cosines and sines, for queries and again for keys, not cut by tp
    attention         s e q each for queries and output, s e kv for keys, 4 s heads for the log-sum-exp;
                      values are a view that keeps the fused s e (q + 2 kv) alive. Under context parallelism
                      the gathered keys and values of all tokens instead, S e 2 kv
    gated MLP         s 5 e f: both halves, silu, the linear half plus its offset, the product

With more tp ranks than KV heads Megatron gathers the fused projection of all ranks, s e (q + 2 kv) of the
model. The back end `flex` gives its output by heads, so that linear_proj's input is one more copy, s e q;
`varlen` copies the keys and values of every leaf's path. Fused kernels of Transformer Engine would save less:
these figures bound them.

Recomputation keeps the inputs of what it computes again: `core_attn` those of attention (the rank's own keys
and values, ungathered), `mlp` linear_fc1's, `full` r e h for every `layers` layers, and the rotary angles,
s 4 d, once.

The head runs on the T trained tokens: T e h and T 4 V / tp for the softmax; while it is computed up to two
more copies of the logits live.

Not here: which passes are in flight (`memory`), temporary buffers of the backward pass
(`plan.reserve_gib`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_tree.config import ParallelConfig, RecomputeConfig
from megatron_tree.reshard.names import ModelShape

BYTES = {"fp32": 4, "bf16": 2}
Backend = Literal["node", "flex", "varlen"]
Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """What the activations of a micro-batch depend on; context-parallel ranks share it evenly."""

    tokens: float  # S
    trained: float  # T
    copied: float  # if each leaf's path were a sequence of its own: what `varlen` attends to


@dataclass(frozen=True, slots=True)
class Activations:
    shape: ModelShape
    parallel: ParallelConfig
    dtype: Dtype
    backend: Backend
    batch: PackedTokens

    @property
    def _element(self) -> int:
        return BYTES[self.dtype]

    @property
    def _own(self) -> float:
        """Tokens of this rank outside the parts that sequence parallelism splits."""
        return self.batch.tokens / self.parallel.cp

    @property
    def _split(self) -> float:
        """Tokens of this rank in norms and residuals."""
        return self._own / (self.parallel.tp if self.parallel.sequence_parallel else 1)

    @property
    def hidden(self) -> float:
        """A layer's input."""
        return self._split * self._element * self.shape.hidden

    def chunk(self, num_layers: int, recompute: RecomputeConfig, *, first: bool, head: bool) -> float:
        """One pass of a model chunk; `first` has the embedding, `head` is the last (see `head`)."""
        saved = self._layers(num_layers, recompute)
        if first:
            return saved + 8 * self._own  # token ids, for the embedding
        # what the stage before sent is held anyhow where a checkpoint or a norm in fp32 saves it
        if num_layers:
            held = self.dtype == "fp32" or recompute.granularity == "full"
        else:
            held = self.dtype == "fp32" and head
        return saved if held else saved + self.hidden

    def _layers(self, count: int, recompute: RecomputeConfig) -> float:
        if recompute.granularity == "full":
            angles = 4 * self._own * self.shape.head_dim if count else 0.0
            return -(-count // recompute.layers) * self.hidden + angles
        return count * self.layer(recompute.modules if recompute.granularity == "selective" else ())

    def layer(self, recomputed: tuple[str, ...] = ()) -> float:
        """One layer, of which the modules `recomputed` keep their inputs only."""
        norms = 2 * (self._norm(self._split, self.shape.hidden) + self.hidden)
        mlp = 0.0 if "mlp" in recomputed else self._mlp
        return norms + self._attention(recomputed="core_attn" in recomputed) + mlp

    def again(self, num_layers: int, recompute: RecomputeConfig) -> float:
        """What the backward pass computes again at one time, beside what was kept. Attention alone comes back
        when the same layer's MLP, which is larger, has gone."""
        if recompute.granularity == "full":
            layers = min(num_layers, recompute.layers)
            shared = self.hidden if layers and self.dtype == "fp32" else 0.0  # the first norm's input
            return layers * self.layer() - shared
        if recompute.granularity == "selective" and "mlp" in recompute.modules and num_layers:
            return self._mlp
        return 0.0

    @property
    def head(self) -> float:
        """Final norm and head, of the one micro-batch that is there."""
        per_token = self.shape.hidden * self._element + 29  # indices, targets, their mask, log-probs
        trained = self.batch.trained / self.parallel.cp
        return self._norm(self._split, self.shape.hidden) + trained * per_token + 4 * self._num_logits

    @property
    def logits(self) -> float:
        """Beside the softmax: logits in the weights' dtype, and one more fp32 copy while they are divided."""
        return (self._element + 4) * self._num_logits

    @property
    def _num_logits(self) -> float:
        parallel = self.parallel
        return self.batch.trained / parallel.cp * self.shape.padded_vocab(parallel.tp) / parallel.tp

    def _norm(self, tokens: float, width: float) -> float:
        return tokens * (4 * width + self._element * width + 4)

    def _attention(self, *, recomputed: bool) -> float:
        """From the fused projection to linear_proj's input."""
        gathered = (self.parallel.cp > 1 or self.backend == "varlen") and not recomputed
        saved = self._own * 4 * self._element * self.shape.head_dim  # rotary tables
        saved += (3 if self.backend == "flex" and not recomputed else 2) * self._queries
        if gathered:
            copies = self.batch.copied / self.batch.tokens if self.backend == "varlen" else self.parallel.cp
            saved += 2 * copies * self._keys
        else:
            saved += self._keys
        if not gathered or (self.shape.qk_norm and self.dtype == "fp32"):
            saved += self._fused
        if not recomputed:
            saved += 4 * self._own * self.shape.heads / self.parallel.tp  # log-sum-exp
        return saved + (self._head_norms if self.shape.qk_norm else 0.0)

    @property
    def _head_norms(self) -> float:
        """In fp32 their inputs are views of the fused projection, but for queries that had to be copied out
        of several groups."""
        elements = (self._queries + self._keys) / self._element
        saved = self._norm(elements / self.shape.head_dim, self.shape.head_dim)
        if self.dtype == "fp32":
            grouped = 1 < self.shape.kv_heads / self.parallel.tp < self.shape.heads / self.parallel.tp
            saved -= self._keys + (0.0 if grouped else self._queries)
        return saved

    @property
    def _queries(self) -> float:
        return self._own * self._element * self.shape.heads / self.parallel.tp * self.shape.head_dim

    @property
    def _keys(self) -> float:
        """Of the rank's own tokens; values are as many."""
        heads = max(self.shape.kv_heads / self.parallel.tp, 1)
        return self._own * self._element * heads * self.shape.head_dim

    @property
    def _fused(self) -> float:
        """All that linear_qkv gives; of every rank where there are more ranks than KV heads."""
        parts = 1 if self.parallel.tp > self.shape.kv_heads else self.parallel.tp
        heads = (self.shape.heads + 2 * self.shape.kv_heads) / parts
        return self._own * self._element * heads * self.shape.head_dim

    @property
    def _mlp(self) -> float:
        return self._own * 5 * self._element * self.shape.ffn / self.parallel.tp
