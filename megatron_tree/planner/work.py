"""What an iteration is expected to cost: tokens, FLOPs, and the packing they give. Pure.

Tokens follow DESIGN 5.1. Every path has D = min(max_turns, max_tool_calls + 1) turns of A sampled and O
observed tokens, the last without observation: `plan.fill` times the caps, less where max_path_tokens is
smaller. A tree is a chain and L N branches; a branch starts at one of the chain's candidates, each as likely,
and runs to turn D. So it has D/2 turns on the mean, (D + 1)/2 where the prompt is always a candidate.

Engines see trees; the trainer sees prompts, whose trees share the prompt's tokens.

Departures, all small: branches of later rounds start in the chain too (in truth deeper, hence shorter);
agents that answer early are not foreseen (`plan.fill`); prefix caches are taken to hit everything that a tree
has computed before, whole blocks or not, and nothing of other trees; prompts that are cut to fit a
micro-batch recompute nothing.

FLOPs: 2 a parameter and token for a forward pass of linear layers, the head on trained or sampled tokens
only; 4 a query column and visible key for attention; a backward pass is twice its forward pass, plus what
`train.recompute` computes again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_tree.config import Config, RecomputeConfig
from megatron_tree.planner.activations import PackedTokens
from megatron_tree.reshard.names import ModelShape


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one tree or prompt, or summed over an iteration."""

    generated: float  # sampled by the engines; exactly these are trained
    observed: float  # prompt and observations, each once
    requested: float  # prompts of all requests: what is prefilled without a prefix cache
    copied: float  # if each leaf's path were a sequence of its own
    generated_keys: float  # visible keys, summed over generated tokens
    observed_keys: float
    requests: float  # one a turn

    @property
    def unique(self) -> float:
        return self.generated + self.observed

    @property
    def cached(self) -> float:
        """Of `requested`, what the prefix cache holds."""
        return self.requested - self.observed

    @property
    def keys(self) -> float:
        return self.generated_keys + self.observed_keys

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __mul__(self, factor: float) -> Tokens:
        return Tokens(*(factor * getattr(self, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Path:
    """A root-to-leaf path of equal turns."""

    prompt: float
    turns: int
    action: float
    observation: float

    @property
    def turn(self) -> float:
        return self.action + self.observation

    @property
    def length(self) -> float:
        """With the prompt."""
        return self.prompt + self.turns * self.turn - self.observation

    def after(self, turns: int) -> Tokens:
        """What is new on a path that shares its first `turns` turns; the whole path but its prompt with 0."""
        rest = range(turns, self.turns)
        starts = [self.prompt + i * self.turn for i in rest]  # contexts of the requests
        seen = [start + self.action for start in starts[:-1]]  # and before each observation
        return Tokens(
            generated=len(rest) * self.action,
            observed=(len(rest) - 1) * self.observation,
            requested=sum(starts),
            copied=self.length,
            generated_keys=sum(_keys(start, self.action) for start in starts),
            observed_keys=sum(_keys(start, self.observation) for start in seen),
            requests=len(rest),
        )


def expected_path(config: Config) -> Path:
    fill, rollout = config.plan.fill, config.rollout
    turns = min(rollout.max_turns, rollout.max_tool_calls + 1)
    action, observation = fill * rollout.max_turn_tokens, fill * rollout.max_observation_tokens
    fits = rollout.max_path_tokens / (turns * action + (turns - 1) * observation)
    shrink = min(fits, 1.0)
    return Path(fill * config.data.max_prompt_tokens, turns, shrink * action, shrink * observation)


def expected_tree(config: Config) -> Tokens:
    """One tree: the prompt, a chain, and the branches."""
    path, rollout = expected_path(config), config.rollout
    tree = _root(path) + path.after(0)
    starts = branch_starts(config)
    for start in starts:
        tree += path.after(start) * (rollout.expand_rounds * rollout.expand_nodes / len(starts))
    return tree


def expected_prompt(config: Config) -> Tokens:
    """The trees of one prompt, its tokens once: what the trainer packs."""
    trees = config.rollout.trees
    return expected_tree(config) * trees + _root(expected_path(config)) * (1 - trees)


def _root(path: Path) -> Tokens:
    return Tokens(0, path.prompt, 0, 0, 0, _keys(0, path.prompt), 0)


def branch_starts(config: Config) -> range:
    """Turns that a branch may share with the chain. Empty: no branch is possible."""
    turns, root = expected_path(config).turns, config.rollout.root
    if root == "always" or (root == "fallback" and turns == 1):
        return range(turns)
    return range(1, turns)


def micro_batch(config: Config) -> PackedTokens:
    """A full micro-batch of such prompts."""
    prompt = expected_prompt(config)
    share = config.train.micro_batch_tokens / prompt.unique
    return PackedTokens(
        tokens=config.train.micro_batch_tokens,
        trained=share * prompt.generated,
        copied=share * prompt.copied,
    )


def num_microbatches(config: Config) -> int:
    """Of one optimizer step, on each dp rank: whole prompts into bins, pieces of larger ones into bins of
    their own; a multiple of pp where stages are interleaved.

    Prompts differ in length, so a bin has on the mean half a prompt's room left when it is closed.
    """
    parallel, pieces = config.train.parallel, num_pieces(config)
    room = config.train.micro_batch_tokens / expected_prompt(config).unique  # in prompts
    multiple = parallel.pp if parallel.vpp > 1 else 1
    return math.ceil(pieces / max(1.0, room - 0.5) / (parallel.dp * multiple)) * multiple


def num_pieces(config: Config) -> int:
    """Prompts of one optimizer step, over all dp ranks; where a prompt is over the budget its pieces, each a
    whole path and what more leaves add to it, seven eighths full (measured on random trees)."""
    rollout, budget = config.rollout, config.train.micro_batch_tokens
    prompts, tokens = rollout.prompts // config.train.mini_batches, expected_prompt(config).unique
    if tokens <= budget:
        return prompts
    leaves, path = rollout.trees * rollout.leaves_per_tree, expected_path(config).length
    a_leaf = (tokens - path) / (leaves - 1)
    return math.ceil(prompts * leaves / max(1.0, 7 / 8 * (1 + (budget - path) / a_leaf)))


@dataclass(frozen=True, slots=True)
class Flops:
    """Of one iteration, over all ranks or engines."""

    decode: float
    prefill: float
    score: float  # old log-probs, and the reference's
    train: float
    recomputed: float  # by backward passes, not in `train`


def flops(
    shape: ModelShape, grown: Tokens, packed: Tokens, recompute: RecomputeConfig, *, reference: bool
) -> Flops:
    """`grown` by the engines, `packed` for the trainer."""
    forward, layers = forward_flops(shape, packed, shape.num_layers, head=True), shape.num_layers
    return Flops(
        decode=layers * _layer(shape, grown.generated, grown.generated_keys) + _head(shape, grown),
        prefill=layers * _layer(shape, grown.observed, grown.observed_keys),
        score=forward * num_scores(reference=reference),
        train=3 * forward,
        recomputed=recomputed_flops(shape, packed, layers, recompute),
    )


def num_scores(*, reference: bool) -> int:
    """Passes over an iteration's trees that only read log-probs: the old ones, and the reference's."""
    return 2 if reference else 1


def forward_flops(shape: ModelShape, tokens: Tokens, num_layers: int, *, head: bool) -> float:
    """Of a pass of `tokens` through some layers, and the head."""
    layers = num_layers * _layer(shape, tokens.unique, tokens.keys)
    return layers + (_head(shape, tokens) if head else 0)


def recomputed_flops(shape: ModelShape, tokens: Tokens, num_layers: int, recompute: RecomputeConfig) -> float:
    if recompute.granularity == "full":
        return forward_flops(shape, tokens, num_layers, head=False)
    again = 0.0
    if recompute.granularity == "selective":
        if "core_attn" in recompute.modules:
            again += _attention(shape, tokens.keys)
        if "mlp" in recompute.modules:
            again += 2 * 3 * shape.hidden * shape.ffn * tokens.unique
    return num_layers * again


def layer_parameters(shape: ModelShape) -> int:
    """Of the linear maps of one layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * q + 2 * kv + 3 * shape.ffn)


def _layer(shape: ModelShape, tokens: float, keys: float) -> float:
    return 2 * layer_parameters(shape) * tokens + _attention(shape, keys)


def _attention(shape: ModelShape, keys: float) -> float:
    return 4 * shape.heads * shape.head_dim * keys


def _head(shape: ModelShape, tokens: Tokens) -> float:
    return 2 * shape.hidden * shape.vocab * tokens.generated


def _keys(before: float, tokens: float) -> float:
    """Keys that `tokens` consecutive tokens see, themselves included, behind a context of `before`."""
    return tokens * before + tokens * (tokens + 1) / 2
