"""A lookup world that fits a one-million-parameter model: its environment, its reward, its questions.

A question `Q r3 r5 e12 ?` asks for the entity reached from `e12` by relation `r3`, then `r5`. The agent looks
up one hop at a time (`call r3 e12 ;` is answered by `got e40 ;`) and ends with `answer e7 ;`.

Invariants:
1. Every question has relations of its own, drawn from its seed: nothing about one helps with another.
2. A question of the training split holds only training facts, one of the test split only test facts: a fact
   `relation entity -> entity` belongs to exactly one split, so no hop of any answer path is shared.
3. The entities of an answer path differ, so that stopping a hop early is never right by luck, and the
   prompt never holds the answer.

Left out: a tool that fails or is slow, answers of several words (see `search_wiki`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tree.rollout.episode import Reply, Score, Turn
from megatron_tree.types import Row

NUM_ENTITIES = 48
NUM_RELATIONS = 8
RELATIONS = {f"r{i}": i for i in range(NUM_RELATIONS)}
ENTITIES = {f"e{i}": i for i in range(NUM_ENTITIES)}
SPLITS = ("train", "test")
HINT = " say call or answer ;"
WORDS = (
    *("<pad>", "<end>", "<unknown>", "Q", "?", "call", "answer", "got", "say", "or", "no", "more", ";"),
    *RELATIONS,
    *ENTITIES,
)
"""The vocabulary. A word is a token."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The hidden relations of one question."""

    split: str
    seed: int

    def hop(self, relation: int, entity: int) -> int:
        """The entity that `relation` leads to from `entity`; never the entity itself."""
        own = [e for e in range(NUM_ENTITIES) if e != entity and split_of(relation, entity, e) == self.split]
        return random.Random(f"{self.split} {self.seed} {relation} {entity}").choice(own)

    def path(self, relations: Sequence[int], entity: int) -> list[int]:
        """The entities from `entity` to the answer, both included: one more than there are relations."""
        path = [entity]
        for relation in relations:
            path.append(self.hop(relation, path[-1]))
        return path


def split_of(relation: int, entity: int, reached: int) -> str:
    """The only split whose questions may hold this fact: a quarter of all facts is the test's."""
    return "test" if (relation + entity + reached) % 4 == 0 else "train"


@dataclass(frozen=True, slots=True)
class Question:
    facts: Facts
    relations: tuple[int, ...]
    entity: int

    @property
    def text(self) -> str:
        return f"Q {' '.join(f'r{r}' for r in self.relations)} e{self.entity} ?"

    @property
    def path(self) -> list[int]:
        return self.facts.path(self.relations, self.entity)


def draw_questions(split: str, count: int, seed: int) -> list[Question]:
    """`count` questions, in turn of two and of three hops, whose paths visit no entity twice."""
    if split not in SPLITS:
        raise ValueError(f"split: must be train or test, got {split!r}")
    draws = random.Random(f"{split} {seed}")
    questions: list[Question] = []
    while len(questions) < count:
        relations = tuple(draws.randrange(NUM_RELATIONS) for _ in range(2 + len(questions) % 2))
        question = Question(Facts(split, draws.getrandbits(48)), relations, draws.randrange(NUM_ENTITIES))
        if len(set(question.path)) == len(question.path):
            questions.append(question)
    return questions


class LookupWorld:
    """The environment: `environment.target: examples.quickstart.world:LookupWorld`."""

    stop = (";",)

    def begin(self, row: Row) -> LookupEpisode:
        info = row.extra["extra_info"]
        return LookupEpisode(Facts(info["split"], info["seed"]))


@dataclass(frozen=True, slots=True)
class LookupEpisode:
    """One path. It keeps no state, because a question's facts never change."""

    facts: Facts

    async def act(self, action: str, *, turns_left: int, tool_calls_left: int) -> Reply:
        match action.split():
            case ["answer", entity, ";"] if entity in ENTITIES:
                return Reply("", done=True)
            case ["call", relation, entity, ";"] if relation in RELATIONS and entity in ENTITIES:
                if tool_calls_left < 1:
                    return Reply(" no more call ;", valid=False)
                reached = self.facts.hop(RELATIONS[relation], ENTITIES[entity])
                return Reply(f" got e{reached} ;", num_tool_calls=1)
        return Reply(HINT, valid=False)

    def fork(self) -> LookupEpisode:
        return self


class LookupReward:
    """1 for the right entity, `wrong` for another one, 0 for no answer.

    Reports `stopped_early`: the answer is an entity that the path visits before its end.
    """

    def __init__(self, wrong: float = 0.1) -> None:
        if not 0 <= wrong < 1:
            raise ValueError(f"wrong: must be at least 0 and below 1, got {wrong}")
        self.wrong = wrong

    def __call__(self, row: Row, turns: Sequence[Turn]) -> Score:
        if not turns or turns[-1].finish != "answer":
            return Score(0.0, 0.0, None, {"stopped_early": 0.0})
        answer = turns[-1].action.split()[1]
        right = answer in row.targets
        early = not right and answer in row.extra["extra_info"]["path"]
        reward = 1.0 if right else self.wrong
        return Score(reward, float(right), answer, {"stopped_early": float(early)})
