"""The hand-offs between the parts, each a named dataclass.

Three wires cross processes: a `Tree` (engine pool -> driver), a `StepBatch` (driver -> train ranks) and
weight slices (train ranks -> engines, see `reshard`). Token ids are the truth: text is derived from them for
parsing and is never re-tokenised. Arrays are numpy, so that they travel without copies and without torch.

`_ids` arrays are int32, log-probs and weights float32, packed indices int64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
IndexArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class RunFailed(RuntimeError):
    """A part failed for good, after whatever retries it has; one line for the user, no fault of the
    config."""


Finish = Literal["prompt", "tool", "invalid", "answer", "max_tokens", "max_turns"]
"""Why a node ended: `prompt` (node 0), `tool` (the tool answered), `invalid` (a hint answered), `answer` (the
agent answered: a leaf), `max_tokens` (the tokens ran out: a leaf), `max_turns` (the turns ran out without an
answer: a leaf)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a data set. `group_id` is unique over all files of a run."""

    group_id: str
    data_source: str
    messages: tuple[dict[str, str], ...]  # [{role, content}], the chat before the first action
    prompt_ids: IntArray  # [P] the chat under the model's own template
    targets: tuple[str, ...]  # golden answers, any of which is right
    extra: dict[str, Any] = field(default_factory=dict)  # the row's other columns, for the environment


@dataclass(slots=True)
class Node:
    """One thought-action-observation turn. Node 0 of a tree is the prompt: no action, its ids are the
    observation.

    Its packed tokens are `action_ids` followed by `observation_ids`. Only action tokens are trained.
    """

    parent: int  # index into Tree.nodes, smaller than the node's own; -1 for the prompt
    action_ids: IntArray  # [A] sampled by the policy
    observation_ids: IntArray  # [O] from the environment; empty at a leaf
    engine_logprobs: FloatArray  # [A] of the sampled tokens, after temperature
    finish: Finish
    policy_version: int  # published version the action was sampled under
    num_tool_calls: int = 0
    prefill_tokens: int = 0  # tokens of the request's prompt
    cached_tokens: int = 0  # of these, found in the engine's prefix cache
    old_logprobs: FloatArray | None = None  # [A] by the trainer, before the iteration's first step
    ref_logprobs: FloatArray | None = None  # [A] by the frozen reference model

    @property
    def num_tokens(self) -> int:
        return len(self.action_ids) + len(self.observation_ids)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The end of one root-to-leaf path (one trajectory)."""

    node: int  # index into Tree.nodes
    reward: float
    success: float  # 1.0 when the answer is right, else 0.0 (or a score in between, by the reward)
    answer: str | None
    metrics: dict[str, float] = field(default_factory=dict)  # what else the reward reports, e.g. {"f1": 0.5}


@dataclass(slots=True)
class Tree:
    """One rollout tree.

    Worked example, M=1 N=1 L=1: the prompt (0), a search turn (1), an answer (2), and a second answer (3)
    branched from node 1: `nodes[i].parent` is -1, 0, 1, 1, the leaves are nodes 2 and 3, `path(3)` is [0, 1,
    3].
    """

    group_id: str
    index: int  # which of the group's M trees
    nodes: list[Node]  # in path order: by (round, expansion, turn)
    leaves: list[Leaf]  # in path order

    def path(self, node: int) -> list[int]:
        """Indices from the prompt to `node`, both included."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    @property
    def num_unique_tokens(self) -> int:
        return sum(node.num_tokens for node in self.nodes)

    @property
    def num_copied_tokens(self) -> int:
        """Tokens if each leaf's whole path were a sequence of its own."""
        return sum(self.nodes[i].num_tokens for leaf in self.leaves for i in self.path(leaf.node))


@dataclass(slots=True)
class Group:
    """The M trees of one prompt."""

    row: Row
    trees: list[Tree]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trees packed in depth-first order: S tokens, of which T are trained (counting a branch point once per
    child).

    Token i sees token j iff `j <= i < subtree_end[j]`. Padding sees only itself: `subtree_end = own index +
    1`.

    Worked example: prompt tokens `p q`, children with actions `a b` and `c`. Packed: `p q a b c`;
    position_ids 0 1 2 3 2; subtree_end 5 5 4 4 5; predict_from 1 2 1 (a and c from q, b from a); target_ids a
    b c.
    """

    input_ids: IndexArray  # [S], or [S / cp] of a context-parallel rank's share (`algo.context`)
    position_ids: IndexArray  # as long; depth from the tree's root, not the packed index
    subtree_end: IndexArray  # [S] packed index just past the subtree of the token's node
    predict_from: IndexArray  # [T] packed index whose hidden state predicts the token
    target_ids: IndexArray  # [T]
    adv_pos: FloatArray  # [T] sum over leaves below with A > 0 of c_i A_i (DESIGN 5.3)
    adv_neg: FloatArray  # [T] the same for A < 0; values <= 0
    leaf_weight: FloatArray  # [T] sum over leaves below of c_i
    old_logprobs: FloatArray  # [T]
    ref_logprobs: FloatArray  # [T]
    engine_logprobs: FloatArray  # [T]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        return len(self.target_ids)


StepBatch = list[list[MicroBatch]]
"""One optimizer step: `[dp][num_microbatches]`; every DP rank has the same number."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample."""

    request_id: str  # unique in the run; a resubmission uses a new one
    prompt_ids: IntArray  # [P] the whole context
    max_tokens: int
    seed: int  # derived from the path, so that the order of completion does not matter
    temperature: float  # 0 is greedy
    top_p: float
    stop: tuple[str, ...]  # kept in the output
    route: str  # requests of one tree carry one route and go to the engine that holds its prefix


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What the engine sampled. An aborted request is never a result: the pool resubmits it."""

    token_ids: IntArray  # [A]
    logprobs: FloatArray  # [A]
    finish: Literal["stop", "length"]  # `stop`: end of sequence or a stop string
    cached_tokens: int  # of the prompt
    policy_version: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Tensors of one pipeline stage that follow one another in the model's layer order."""

    stage: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """How trainers send a version to engines: `reshard.wire`."""

    address: tuple[str, int]  # of the trainers' store, where both ends of a wire meet
    dtype: Literal["float32", "bfloat16"]
    bucket_bytes: int
    num_workers: int  # of an engine
    timeout_s: float  # of anything on a wire
    segments: tuple[Segment, ...]  # the whole model in layer order
    lends: bool = False  # workers read the memory of ranks on their own devices; else they are sent the bytes
    wire: str = ""  # name of this engine's; the pool gives every engine process one of its own


@dataclass(frozen=True, slots=True)
class Update:
    """One published version of the weights, as engines are told of it."""

    image: str  # safetensors file with Hugging Face names, in memory that trainers and engines share
    version: int
    names: tuple[str, ...]  # every tensor of the plan; image or stream must hold these and no other
    stream: Stream | None = None  # instead of the image: the trainers send the version
