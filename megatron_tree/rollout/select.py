"""Which nodes of a tree are expanded. Pure.

Candidates are the step nodes the agent went on from. A node that answered, or that had no turn or token left,
is a leaf and hence none; so every candidate has at least one turn and one token left. The root is a candidate
by `root`: `fallback` only where the tree has no other, `always` (what the authors' code does), `never`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from megatron_tree.types import Tree

Root = Literal["fallback", "always", "never"]


def candidates(tree: Tree, root: Root) -> list[int]:
    """Indices of the nodes that may be expanded, in node order. Empty only with `never`, where no step node
    is left.

    Worked example, nodes prompt, tool, answer: `fallback` and `never` give [1], `always` [0, 1].
    """
    steps = [i for i, node in enumerate(tree.nodes) if node.finish in ("tool", "invalid")]
    if root == "always" or (root == "fallback" and not steps):
        return [0, *steps]
    return steps


def draw(found: Sequence[int], num: int, generator: np.random.Generator) -> list[int]:
    """`num` candidates, each as likely as any other: without replacement while they last, then from all
    again.

    So two candidates and num = 5 give each of them twice and one of them a third time. No candidates: no
    draws.
    """
    drawn: list[int] = []
    while found and len(drawn) < num:
        drawn += generator.permutation(found)[: num - len(drawn)].tolist()
    return drawn
