"""Demonstrations for the SFT warm-up: each a tree of one path with reward 1.

A JSONL line is `{prompt: [{role, content}], turns: [{action, observation}]}`; the last turn has no
observation. Actions and observations are encoded separately, as growth encodes them, and an action is trained
as it is written: where actions do not end with a stop string, write the end-of-sequence token into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tree.data.prompts import EncodeChat, encode_prompt, parse_messages, read_records, short
from megatron_tree.types import IntArray, Leaf, Node, Tree

Encode = Callable[[str], IntArray]


def load_demonstrations(
    paths: Sequence[str],
    *,
    encode_chat: EncodeChat,
    encode: Encode,
    max_prompt_tokens: int,
    max_path_tokens: int,
) -> list[Tree]:
    """One tree per line. Raises ValueError naming file and line."""
    if not paths:
        raise ValueError("sft.data: must name at least one file, got none")
    trees = []
    for index, path in enumerate(paths):
        for line, where, raw in read_records(Path(path)):
            messages = parse_messages(raw.get("prompt"), where)
            prompt_ids = encode_prompt(messages, where, encode_chat)
            _at_most(max_prompt_tokens, len(prompt_ids), f"{where}: prompt")
            nodes = [_node(-1, _nothing(), prompt_ids)]
            nodes += _turns(raw.get("turns"), where, encode)
            _at_most(max_path_tokens, sum(n.num_tokens for n in nodes[1:]), f"{where}: turns")
            nodes[0].finish, nodes[-1].finish = "prompt", "answer"
            leaf = Leaf(node=len(nodes) - 1, reward=1.0, success=1.0, answer=None)
            trees.append(Tree(f"sft/{index}/{Path(path).name}:{line}", 0, nodes, [leaf]))
    return trees


def batch_of(demonstrations: Sequence[Tree], size: int, seed: int, step: int) -> list[Tree]:
    """Of step `step`: batches of a seeded order, epoch after epoch, without the order's remainder."""
    size = min(size, len(demonstrations))
    epoch, place = divmod(step, len(demonstrations) // size)
    order = np.random.default_rng([seed, epoch]).permutation(len(demonstrations))
    return [demonstrations[i] for i in order[place * size : (place + 1) * size]]


def _turns(turns: object, where: str, encode: Encode) -> list[Node]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: turns: must be a list of {{action, observation}}, got {short(turns)}")
    nodes = []
    for index, turn in enumerate(turns):
        field, last = f"{where}: turns[{index}]", index == len(turns) - 1
        if not isinstance(turn, dict) or set(turn) - {"action", "observation"}:
            raise ValueError(f"{field}: must be {{action, observation}}, got {short(turn)}")
        if last and turn.get("observation"):
            raise ValueError(
                f"{field}.observation: the last turn must have none, got {short(turn['observation'])}"
            )
        action = _encoded(turn, "action", field, encode)
        observation = _nothing() if last else _encoded(turn, "observation", field, encode)
        nodes.append(_node(index, action, observation))
    return nodes


def _encoded(turn: dict[str, Any], name: str, field: str, encode: Encode) -> IntArray:
    text = turn.get(name)
    ids = encode(text) if isinstance(text, str) else _nothing()
    if len(ids) == 0:
        raise ValueError(f"{field}.{name}: must be a text of at least one token, got {short(text)}")
    return ids


def _node(parent: int, action_ids: IntArray, observation_ids: IntArray) -> Node:
    return Node(
        parent=parent,
        action_ids=action_ids,
        observation_ids=observation_ids,
        engine_logprobs=np.zeros(len(action_ids), dtype=np.float32),
        finish="tool",
        policy_version=0,
    )


def _nothing() -> IntArray:
    return np.empty(0, dtype=np.int32)


def _at_most(limit: int, got: int, what: str) -> None:
    if got > limit:
        raise ValueError(f"{what}: must have at most {limit} tokens, got {got}")
