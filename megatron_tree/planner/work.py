"""What an iteration is expected to cost: tokens, FLOPs, and the packing they give. Pure.

Tokens follow DESIGN 5.1. Every path has D = min(max_turns, max_tool_calls + 1) turns of A sampled and O
observed tokens, the last without observation: `plan.fill` times the caps, less where max_path_tokens is
smaller. A tree is a chain and L N branches; a branch starts at one of the chain's candidates, each as likely,
and runs to turn D. So it has D/2 turns on the mean, (D + 1)/2 where the prompt is always a candidate.

Departures, all small: branches of later rounds start in the chain too (in truth deeper, hence shorter);
agents that answer early are not foreseen (`plan.fill`); prefix caches are taken to hit everything that a tree
has computed before, whole blocks or not; trees that are cut to fit a micro-batch recompute nothing.

FLOPs: 2 a parameter and token for a forward pass of linear layers, the head on trained or sampled tokens
only; 4 a query column and visible key for attention; a backward pass is twice its forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_tree.config import Config
from megatron_tree.planner.memory import PackedTokens
from megatron_tree.reshard.names import ModelShape


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one tree, or summed over the trees of an iteration."""

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
    prompt = Tokens(0, path.prompt, 0, 0, 0, _keys(0, path.prompt), 0)
    tree = prompt + path.after(0)
    starts = branch_starts(config)
    for start in starts:
        tree += path.after(start) * (rollout.expand_rounds * rollout.expand_nodes / len(starts))
    return tree


def branch_starts(config: Config) -> range:
    """Turns that a branch may share with the chain. Empty: no branch is possible."""
    turns, root = expected_path(config).turns, config.rollout.root
    if root == "always" or (root == "fallback" and turns == 1):
        return range(turns)
    return range(1, turns)


def expected_iteration(config: Config) -> Tokens:
    return expected_tree(config) * (config.rollout.prompts * config.rollout.trees)


def micro_batch(config: Config) -> PackedTokens:
    """A full micro-batch of such trees."""
    tree = expected_tree(config)
    share = config.train.micro_batch_tokens / tree.unique
    return PackedTokens(tokens=config.train.micro_batch_tokens, trained=share * tree.generated)


def num_microbatches(config: Config) -> int:
    """Of one optimizer step, on each dp rank: whole trees into bins, a larger one into bins of its own.

    Trees differ in length, so a bin has on the mean half a tree's room left when it is closed.
    """
    rollout, train = config.rollout, config.train
    trees = rollout.prompts * rollout.trees // train.mini_batches
    fit = train.micro_batch_tokens / expected_tree(config).unique
    bins = trees / max(1.0, fit - 0.5) if fit >= 1 else trees * math.ceil(1 / fit)
    return math.ceil(bins / train.parallel.dp)


@dataclass(frozen=True, slots=True)
class Flops:
    """Of one iteration, over all ranks or engines."""

    decode: float
    prefill: float
    score: float  # old log-probs, and the reference's
    train: float


def flops(shape: ModelShape, tokens: Tokens, *, reference: bool) -> Flops:
    head = 2 * shape.hidden * shape.vocab
    forward = _body(shape, tokens.unique, tokens.keys) + head * tokens.generated
    return Flops(
        decode=_body(shape, tokens.generated, tokens.generated_keys) + head * tokens.generated,
        prefill=_body(shape, tokens.observed, tokens.observed_keys),
        score=forward * (2 if reference else 1),
        train=3 * forward,
    )


def layer_parameters(shape: ModelShape) -> int:
    """Of the linear maps of one layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * q + 2 * kv + 3 * shape.ffn)


def _body(shape: ModelShape, tokens: float, keys: float) -> float:
    linear = 2 * layer_parameters(shape) * tokens
    return shape.num_layers * (linear + 4 * shape.heads * shape.head_dim * keys)


def _keys(before: float, tokens: float) -> float:
    """Keys that `tokens` consecutive tokens see, themselves included, behind a context of `before`."""
    return tokens * before + tokens * (tokens + 1) / 2
