"""What the growth of trees asks of the outside, as Protocols: an environment, a reward, an engine.

A user's environment and reward are named in the config as `module:Class` and need nothing but these methods.
Growth itself (`grow`) knows no tool, no text protocol and no engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_tree.config import PluginConfig
from megatron_tree.types import Finish, GenerateRequest, GenerateResult, Row


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment says to one action."""

    observation: str  # the text the policy reads next; empty when done
    done: bool = False  # the path ends here
    valid: bool = True  # False: the action was not understood or not allowed, and the observation is a hint
    num_tool_calls: int = 0  # that this action made; never more than were left
    keep_end: str = ""  # end of `observation` that survives when it is cut to the token cap (a closing tag)


class Episode(Protocol):
    """The state of one path. Growth forks it at every branch and never shares it between branches."""

    async def act(self, action: str, *, turns_left: int, tool_calls_left: int) -> Reply:
        """Carries out one action. `turns_left` counts the turns after this one."""
        ...

    def fork(self) -> Episode:
        """An independent copy. An episode without state of its own may return itself."""
        ...


class Environment(Protocol):
    """One object for the whole run, shared by all episodes. May have `async def close(self)`."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an action; they stay part of it."""
        ...

    def begin(self, row: Row) -> Episode: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a finished path, as text."""

    action: str
    observation: str
    finish: Finish


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    success: float
    answer: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    def __call__(self, row: Row, turns: Sequence[Turn]) -> Score:
        """Scores one root-to-leaf path."""
        ...


class Generate(Protocol):
    async def __call__(self, request: GenerateRequest) -> GenerateResult: ...


def build(plugin: PluginConfig, field_name: str) -> Any:
    """Imports `module:Class` and calls it with the options. Raises ValueError naming the field."""
    module, _, name = plugin.target.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field_name}.target: cannot import {plugin.target}: {error}") from error
    try:
        return made(**plugin.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field_name}.options: {plugin.target} refuses them: {error}") from error
