"""Placements: which rank holds which expert of a layer, as a value.

    Placement.parse('''
        0: 0 1 +2
        1: 2
        2: 3 +2
        3:
    ''')

Four experts on four ranks: rank 0 owns experts 0 and 1 and holds a replica of expert 2; rank 3 holds none. An owner has
an expert's parameters and optimizer state; a replica has the parameters during a step. A placement without replicas is
a sharding (P in the Hecate paper, section 3; P' has replicas).

Ranks are numbered from 0 in the expert-parallel group; consecutive ranks share a node. Axes in suffixes: I iterations,
L layers, W ranks, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fusedmoe.errors import ConfigError

_Value = TypeVar("_Value", bound=np.generic)
_EXPERT_PATTERN = re.compile(r"\+?\d+", re.ASCII)


@dataclass(frozen=True)
class NodeLayout:
    """Nodes of `per_node` consecutive ranks. Raises `ConfigError` unless all nodes are full."""

    num_ranks: int
    per_node: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.per_node < 1 or self.num_ranks % self.per_node:
            raise ConfigError(
                f"{self.num_ranks} ranks cannot stand in nodes of {self.per_node}: "
                "give as many ranks as a multiple of the ranks of a node"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.per_node

    @property
    def node_W(self) -> NDArray[np.int64]:
        """[W], the node of each rank."""
        return np.arange(self.num_ranks) // self.per_node

    def of(self, rank: int) -> int:
        return rank // self.per_node

    def by_node(self, values_XW: NDArray[_Value]) -> NDArray[_Value]:
        """View [..., W] as [..., N, R], by node and rank within the node."""
        return values_XW.reshape(*values_XW.shape[:-1], self.num_nodes, self.per_node)

    def __str__(self) -> str:
        return f"{self.num_nodes} × {self.per_node}"


@dataclass(frozen=True)
class Placement:
    """Owner of each expert, and the other ranks that hold it, in ascending order.

    Raises `ConfigError` for an invalid rank, and for a rank that holds an expert twice.

    Attributes:
        num_ranks: a rank may hold nothing.
        owners: [E], the owner of each expert.
        replicas: [E], the ranks with a replica of each expert, without the owner.
    """

    num_ranks: int
    owners: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        # Sorted plain integers: placements are compared, hashed and sent to other ranks.
        owners = tuple(map(int, self.owners))
        replicas = tuple(tuple(sorted(map(int, of))) if of else () for of in self.replicas) or ((),) * len(owners)
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "replicas", replicas)
        if self.num_ranks < 1 or not owners:
            raise ConfigError(
                f"placement: {len(owners)} experts on {self.num_ranks} ranks; it needs one of each at least"
            )
        if len(replicas) != len(owners):
            raise ConfigError(f"placement: replicas of {len(replicas)} experts, but owners of {len(owners)}")
        for expert, (owner, holders) in enumerate(zip(owners, replicas, strict=True)):
            if not holders and 0 <= owner < self.num_ranks:
                continue  # most experts need no further checks
            for rank in (owner, *holders):
                if not 0 <= rank < self.num_ranks:
                    raise ConfigError(
                        f"placement: expert {expert} is on rank {rank}; ranks are 0 to {self.num_ranks - 1}"
                    )
            if owner in holders:
                raise ConfigError(f"placement: rank {owner} owns expert {expert}, so it cannot hold a replica as well")
            if len(set(holders)) < len(holders):
                raise ConfigError(f"placement: a rank holds two replicas of expert {expert} (ranks {list(holders)})")

    @classmethod
    def even(cls, num_ranks: int, experts: int) -> Placement:
        """Return the placement of static expert parallelism: experts in order, as even as possible."""
        return cls(num_ranks, tuple(expert * num_ranks // experts for expert in range(experts)))

    @classmethod
    def holding(cls, owners: Iterable[int], holds_EW: NDArray[np.bool_]) -> Placement:
        """Return the placement with these owners, and replicas where `holds_EW` is True."""
        owners = tuple(owners)
        replicas: list[list[int]] = [[] for _ in owners]
        for expert, rank in zip(*(numbers.tolist() for numbers in holds_EW.nonzero()), strict=True):
            if rank != owners[expert]:
                replicas[expert].append(rank)
        placement = cls(holds_EW.shape[1], owners, tuple(map(tuple, replicas)))
        held_EW = np.array(holds_EW, dtype=np.bool_)
        held_EW[np.arange(len(owners)), owners] = True
        held_EW.flags.writeable = False
        vars(placement)["holds_EW"] = held_EW  # fills the cached property, which balances read
        return placement

    @property
    def experts(self) -> int:
        return len(self.owners)

    @cached_property
    def holds_EW(self) -> NDArray[np.bool_]:
        """Read-only [E, W] bool: whether a rank holds an expert, as owner or replica."""
        held = [(expert, rank) for expert, others in enumerate(self.replicas) for rank in others]
        expert_n, rank_n = np.array([*enumerate(self.owners), *held]).T
        holds_EW = np.zeros((self.experts, self.num_ranks), dtype=np.bool_)
        holds_EW[expert_n, rank_n] = True
        holds_EW.flags.writeable = False  # cached: must not change
        return holds_EW

    @property
    def sharding(self) -> Placement:
        """The placement with the same owners, without replicas."""
        return Placement(self.num_ranks, self.owners)

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the experts that a rank owns, ascending."""
        return tuple(expert for expert, owner in enumerate(self.owners) if owner == rank)

    def extra_W(self) -> NDArray[np.int64]:
        """Return the number of replicas on each rank, [W]."""
        return self.holds_EW.sum(axis=0) - np.bincount(self.owners, minlength=self.num_ranks)

    def both(self, other: Placement) -> Placement:
        """Return the placement with the replicas that both have. Owners must be equal."""
        return self if self.is_within(other) else Placement.holding(self.owners, self.holds_EW & other.holds_EW)

    def is_within(self, other: Placement) -> bool:
        """Return whether `other` has the same owners and at least these replicas."""
        same = (self.num_ranks, self.owners) == (other.num_ranks, other.owners)
        return same and not (self.holds_EW & ~other.holds_EW).any()

    def __str__(self) -> str:
        """Return a line for each rank; `parse` is the inverse."""
        lines: list[list[str]] = [[f"{rank}:"] for rank in range(self.num_ranks)]
        for expert, owner in enumerate(self.owners):
            lines[owner].append(str(expert))
        for expert, others in enumerate(self.replicas):
            for rank in others:
                lines[rank].append(f"+{expert}")
        return "\n".join(" ".join(words) for words in lines)

    @classmethod
    def parse(cls, source: str) -> Placement:
        """Parse the text form (module docstring); # starts a comment.

        Raises:
            ConfigError: an invalid line, a missing rank, or an expert without exactly one owner.
        """
        owners: dict[int, int] = {}
        replicas: dict[int, list[int]] = {}
        ranks = 0
        for number, line in enumerate(source.splitlines(), start=1):
            head, colon, rest = line.partition("#")[0].strip().partition(":")
            if not head and not colon:
                continue
            words = rest.split()
            if head != str(ranks) or not colon or not all(map(_EXPERT_PATTERN.fullmatch, words)):
                raise ConfigError(f"placement, line {number}: {line.strip()!r} is not '{ranks}: 0 1 +2', rank by rank")
            for word in words:
                expert = int(word)
                if word.startswith("+"):
                    replicas.setdefault(expert, []).append(ranks)
                elif owners.setdefault(expert, ranks) != ranks or words.count(word) > 1:
                    raise ConfigError(f"placement, line {number}: expert {expert} has an owner already; one is enough")
            ranks += 1
        experts = range(1 + max([*owners, *replicas], default=-1))
        missing = next((expert for expert in experts if expert not in owners), None)
        if missing is not None:
            raise ConfigError(f"placement: expert {missing} has no owner; write its number without a + on one line")
        return cls(ranks, tuple(owners[e] for e in experts), tuple(tuple(replicas.get(e, ())) for e in experts))
