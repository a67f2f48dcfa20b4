"""Experts that are where a placement says: each owned by one rank, and copied for a while to others (Hecate, FSSDP).

Where experts do not move, an expert's number says on which rank it is, and rows go there. Here a rank has a table of
the experts that it holds, first those that it owns, then replicas, and what dispatch takes for experts are places in
these tables: those of rank 0, of rank 1, …, as many for each as the rank with the most has. A rank's rows for one
expert are split over the places of its copies; dispatch, experts and combine do not know of it.

Worked example: rank 0 owns experts 0 and 1, rank 1 owns 2 and has a replica of 0. The tables are [0, 1] and [2, 0], so
places 0, 1, 2, 3 hold experts 0, 1, 2, 0. Rows of rank 0 for expert 0 go to places 0 and 3 (`traffic.dispatch` splits
them), and after the backward pass the replica's gradient goes from rank 1 to rank 0, which adds it to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.autograd.materialise import Returns, SendBack, again, arriving, materialise
from fusedmoe.comm.collectives import all_gather_rows
from fusedmoe.comm.sparse import SparseCollectives, SparseWork
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import version_of
from fusedmoe.engine.dispatcher import recomputing
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts, WithExperts
from fusedmoe.kernels.derivatives import require_no_tangent
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.expert_tables import (
    LateCopies,
    by_place,
    held_after,
    nodes_of,
    of_all_shards,
    replace,
    require_movable_experts,
    table,
)
from fusedmoe.placement.balance import Balance
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.traffic import Transfer, chained, dispatch, gather, reduce
from fusedmoe.runtime.recorder import Moment, Recorder, span
from fusedmoe.schedule.task import GATHER, LATE, REDUCE

T = TypeVar("T")

Travel = Literal["at once", "in turns", "by tasks"]

# (placement, tokens of each rank for each expert) -> a placement with as many replicas or more.
Correct = Callable[[Placement, NDArray[np.int64]], Placement]
# The same, and whether replicas may be added -> which of them computes whose rows.
Balances = Callable[[Placement, NDArray[np.int64], bool], Balance]


class DynamicExperts:
    """The experts of one layer under a placement that changes from step to step.

    Made by `MoELayer(placement="fssdp")`, and told what to do by `fusedmoe.training.ShardedExperts`. Every method that
    says so is collective over the expert-parallel group: its ranks call it in the same order, layer by layer.

    A parameter of the module `experts` is [owned, ...], and lies at the start of memory that has room for this rank's
    replicas after it; results of kernels go by one table, and nothing is copied to make it.

    Attributes:
        placement: which rank owns and holds what; the same on all ranks. At first even, without replicas.
        now: the same, and what was added for this step once the gate had chosen.
        nodes: which ranks of the expert-parallel group share a node.
        rematerialises: replicas are given back after each forward, and fetched again for its backward.
        travel: when replicas come and their gradients go. "at once": from the beginning of the model's forward on, and
            from the end of the layer's backward. "in turns": between the traffic of one layer and that of the next, as
            a step's plan has it. "by tasks": when a plan's tasks say so (`arrive`, and what `call` gives).
        correct: what the placement becomes once the gate has chosen (`fusedmoe.placement.hecate`); None: it stays.
        balances: which copy computes whose rows (`fusedmoe.placement.balance`); None: they are spread evenly.
        outlasts: whether replicas are longer on their way than the rows (`fusedmoe.placement.balance`); None: never.
        late: replicas that were chosen after the gate and outlast the layer's rows, or have a plan's link with these:
            in the forward that chose them they follow the rows, and experts that are here compute theirs first.
        hooked: `begin` is called before each forward of the model; else the layer does, when its turn comes.
        begun: `begin` was called for a forward whose turn has not come yet.
        neighbours: the layers before and after, whose replicas may be fetched one layer ahead.
        clocked: forwards note when this layer's turn came and when it ended (`idle_s`).
        sparse: takes experts from rank to rank, one for all layers, so that they go one after the other; None as long
            as there are no replicas.
        sent_bytes: of experts that this rank has sent, parameters and gradients.
        recorder: measures what travels while set.
        deepcopies: of this one that are there.   copied: how many have been made.   number: which copy this one is.
        learned: gradients have gone through these experts.
    """

    def __init__(self, experts: Experts, count: int, topology: Topology) -> None:
        require_movable_experts(experts, count)
        self.experts, self.group, self._shards = experts, topology.ep, topology.esp
        self.nodes = nodes_of(topology)
        self.placement = Placement.even(topology.ep.size, count)
        self.rematerialises, self.hooked, self.begun = False, False, False
        self.travel: Travel = "at once"
        self.correct: Correct | None = None
        self.balances: Balances | None = None
        self.outlasts: Callable[[Sequence[Transfer], Balance], bool] | None = None
        self.late = LateCopies()
        self.neighbours: tuple[DynamicExperts | None, DynamicExperts | None] = (None, None)
        self.clocked = False
        self._start, self._came, self._ended = Moment(), Moment(), Moment()
        self.recorder: Recorder | None = None
        self.sparse: SparseCollectives | None = None
        self.sent_bytes = 0
        self.deepcopies: WeakSet[DynamicExperts] = WeakSet()
        self.copied, self.number, self.learned = 0, 0, False
        self._works: list[SparseWork] = []
        self._gathered: tuple[Transfer, ...] = ()
        self._present = False
        self._marks: list[tuple[int, int]] = []
        self._returns: Returns | None = None
        self._aliases: tuple[Tensor, ...] = ()
        self._load_E = np.zeros(count, dtype=np.int64)
        self._hold()

    # Where experts are.

    @property
    def names(self) -> list[str]:
        """Names of the parameters in the module `experts`."""
        return [name for name, _ in self.experts.named_parameters()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the owned experts, [owned, ...] each."""
        return list(self.experts.parameters())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters."""
        return sum(p.shape[1:].numel() * p.element_size() for p in self.parameters)

    @property
    def held(self) -> tuple[int, ...]:
        """The experts in this rank's table, row by row."""
        return self._held_W[self.group.index]

    @property
    def owned(self) -> int:
        """Number of experts that this rank owns: the first ones in its table."""
        return len(self.placement.owned(self.group.index))

    @property
    def parametrised(self) -> bool:
        """True where experts compute with what they make of parameters (LoRA by `torch.nn.utils.parametrize`)."""
        return any(parametrize.is_parametrized(module) for module in self.experts.modules())

    def place(self, placement: Placement) -> None:
        """Sets the placement of the next forwards. Replicas are fetched when they begin.

        Raises:
            ConfigError: it has other owners.
        """
        if placement.sharding != self.placement.sharding:
            raise ConfigError("a layer's owners change with reshard(), not with place()")
        self._drop()
        self.placement = placement
        self._hold()

    def reshard(self, sharding: Placement, tensors: Mapping[str, Tensor]) -> None:
        """Changes owners; `tensors` has the parameters of what this rank owns now. Gradients are dropped."""
        # Nothing may still be on its way into the old memory.
        self._drop()
        for name, parameter in self.experts.named_parameters():
            replace(parameter, tensors[name])
        self.placement = sharding
        self._hold()
        self._returns, self._aliases = None, ()  # they know the rows of the owners before

    def rest(self) -> None:
        """Leaves experts with their owners, without replicas and without what brings them."""
        self.placement = self.placement.sharding
        self.rematerialises, self.hooked, self.begun, self.clocked, self._present = False, False, False, False, False
        self.correct, self.balances, self.outlasts = None, None, None
        self.sparse, self.recorder, self._returns = None, None, None
        self.neighbours = None, None
        self._works, self._aliases = [], ()
        self._load_E = np.zeros_like(self._load_E)
        self._hold()

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicExperts:
        # Nobody fetches replicas for a copy, and it is not part of a graph.
        # Shallow: topology, groups and streams are shared.
        made = copy(self)
        memo[id(self)] = made
        self.deepcopies.add(made)
        made.deepcopies, made.copied, made.number, made.learned = WeakSet(), 0, self.copied, False
        self.copied += 1
        made.experts = deepcopy(self.experts, memo)
        made.rest()
        return made

    def _hold(self) -> None:
        # Owned experts first, in the order of their parameters; then replicas, as they come.
        self.now = self.placement.sharding
        self._held_W = [self.now.owned(rank) for rank in range(self.now.ranks)]
        self._add(self.placement)
        self._gathered, self._added, self._learns, self.late = (), False, False, LateCopies()
        self.experts.own_numbers, self.experts.moves = self.placement.owned(self.group.index), True

    def _add(self, wanted: Placement) -> None:
        self._held_W, self.now = held_after(self._held_W, self.now, wanted), wanted

    # Fetching replicas.

    def come_in_turn(self, recomputes: bool, recorder: Recorder | None) -> None:
        """Begins when a forward comes to this layer, unless `begin` was called for it. Collective."""
        if not self.hooked or not (self.begun or recomputes):
            self.recorder = recorder
            self.begin()

    def begin(self) -> None:
        """Starts replicas on their way before a forward, and lays the gradients' way back. Collective."""
        if self.clocked:
            self._start.note(self._device)
        # Those of an earlier forward do not serve again: nothing tells whether parameters have been changed since,
        # where that was done through `.data`. They stay for the backward of that forward.
        self._drop()
        self.begun = True
        # Where replicas come one layer after the other, those of the first layer come now.
        first = self.neighbours[0] is None
        if first if self._ahead or self.travel == "in turns" else self.travel == "at once":
            self.fetch()
        if torch.is_grad_enabled():
            self._lay_way()

    @property
    def _ahead(self) -> bool:
        # What a gate adds would else wait behind the replicas of all layers to come.
        return self.rematerialises or (self.balances is not None and self.travel == "at once")

    def _lay_way(self) -> None:
        """Lays the gradients' way back to the owners."""
        # Before all of the model: what follows in a forward has its backward before it, behind which gradients travel.
        rows = {expert: row for row, expert in enumerate(self.held[: self.owned])}
        self._returns = Returns(rows, [parameter.requires_grad for parameter in self.parameters])
        self._aliases = arriving(self.parameters, self._returns)

    def fetch(self) -> None:
        """Starts what is missing on its way. Collective."""
        if self._present or self._works:
            return
        # The marks tell later whether what is on its way is still what the owner has.
        self._make_room()
        self._marks = self._marked()
        self._gather(self._gathered)

    def _make_room(self) -> None:
        if not self._gathered:
            self._gathered = gather(self.placement.sharding, self.now, self.nodes)
        self._tables()

    def refusal(self) -> str | None:
        """Says why replicas cannot be used, on the rank that owns what they were made of; None: they can."""
        if (self._present or self._works) and self._marks != self._marked():
            return (
                "experts have changed since their replicas started on their way, when the model's forward pass began. "
                "Change parameters between forward and backward passes, not within one"
            )
        return None

    def _marked(self) -> list[tuple[int, int]]:
        """Versions and memory of parameters: whether these were changed, or moved away from their replicas."""
        return [(version_of(parameter), id(parameter.data.untyped_storage())) for parameter in self.parameters]

    def arrive(self) -> None:
        """Waits for what is on its way. Collective."""
        self.fetch()
        self.land()

    def land(self) -> None:
        """Waits for all replicas, late ones too; inside `call` as well, where parameters are tables. Collective."""
        self.late.send()
        self._settle()
        self._present = True

    def fetch_next(self) -> None:
        """Starts the next layer's replicas, where they come one layer ahead, behind this layer's rows. Collective."""
        after = self.neighbours[1]
        if self._ahead and after is not None and self.travel != "in turns":
            after.fetch()

    def _settle(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _drop(self) -> None:
        """Forgets the replicas, which are then fetched again before they are used again."""
        self._settle()
        self._present = False
        self.late.forget()

    def _release(self) -> None:
        """Gives back the replicas' memory."""
        self._drop()
        # The table lies in one memory behind the owned rows: cut off there.
        for parameter in self.parameters:
            parameter.data.untyped_storage().resize_(parameter.nbytes)

    def _gather(
        self,
        transfers: Sequence[Transfer],
        into: tuple[dict[int, int], list[Tensor]] | None = None,
        number: int | None = None,
        recorded: bool = True,
    ) -> None:
        if not transfers:
            return
        assert self.sparse is not None
        during, (rows, tables) = None, into or (self._rows, self._tables())
        if recorded and self.travel != "by tasks":  # else the executor records the task
            phase = "backward" if recomputing() else "forward"  # as a plan's tasks have it
            during = span(self.recorder, "sparse all-gather", kind=GATHER, resource="inter", chunk=number, phase=phase)
        with torch.inference_mode(False):  # it may end in another thread
            work = self.sparse.gather(transfers, rows, tables, during)
        self.sent_bytes += work.sent_bytes
        self._works.append(work)

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def _rows(self) -> dict[int, int]:
        return {expert: row for row, expert in enumerate(self.held)}

    def _tables(self) -> list[Tensor]:
        """Returns the tables, [rows, ...] for each parameter, whose memory they continue; one row at least."""
        with torch.inference_mode(False):  # they last
            return [table(parameter, max(1, len(self.held))) for parameter in self.parameters]

    # Running.

    def split(self, layout: Layout, training: bool, adds: bool = True) -> Layout:
        """Sorts rows that are sorted by expert by the places they go to. Collective.

        `layout` has no slack. Its tokens are counted for the next prediction if `training`. `adds`: replicas may come.
        """
        if self.clocked and training:
            self._came.note(self._device)
        counts_E = layout.counts_E
        # All ranks must know all counts: who sends what to which copy follows from them alone.
        ones, mine = [1] * self.group.size, self.group.index
        tokens_WE = all_gather_rows(self.group, counts_E[None], ones, "exchange of loads").cpu().numpy()
        if training:  # others see other tokens than those that loads are predicted for
            self._load_E += tokens_WE[mine]
        if self.correct is not None and training:
            self._gather(self._correct(self.correct(self.now, of_all_shards(self._shards, tokens_WE))))
        # Every rank works out the same split, and needs its own row: tokens of each expert for each rank.
        if self.balances is not None:
            balance, more = None, tuple[Transfer, ...]()
            # Once a step: a forward that is computed again, or whose backward is to come, must find what it had.
            if training and adds and not (self._added or self._learns):
                self._added = True
                wanted = balance = self.balances(self.now, of_all_shards(self._shards, tokens_WE), True)
                # Without more copies it says already whose rows go where.
                if wanted.placement != self.now or self._shards.size > 1:
                    more, balance = self._correct(wanted.placement), None
            balance = balance or self.balances(self.now, tokens_WE, False)
            sent_EV = balance.sent_from(mine)
            # With a step's plan one thing at a time is on the link. All shards decide as one: rows meet there.
            if more and self.outlasts is not None and (self.travel == "in turns" or self.outlasts(more, wanted)):
                # What is called later finds tables in the place of the parameters.
                start = partial(self._gather, more, (self._rows, self._tables()), LATE)
                self.late = LateCopies(more, self._held_W, wanted.computed_EV, start)
            else:
                self._gather(more)
        else:
            sent_EV = dispatch(tokens_WE, self.now, self.nodes)[mine]
        return by_place(layout, sent_EV, self._held_W)

    def call(self, use: Callable[[Experts, SendBack | None], T], recomputes: bool, *, arrived: bool = True) -> T:
        """Calls `use` with experts whose parameters are those of all that this rank holds. Collective.

        `use` is also given what starts gradients of all of these, in backward, on their way to the owners; unless it is
        called, that is done where autograd has them. None: nothing learns.

        recomputes: the backward that needs the parameters comes at once.
        arrived: replicas are there; else `use` calls `land`, or a task `arrive`, and `use` also `fetch_next`.
        """
        after = self.neighbours[1]
        if not recomputes:
            self.begun = False
        if arrived:
            self.arrive()
            self.fetch_next()
        elif self.travel == "by tasks":
            self._make_room()
        else:
            self.fetch()
        # Forward-mode derivatives would be lost where replicas are made of the owners' parameters.
        require_no_tangent("experts with replicas (placement='fssdp')", self.parameters)
        tables, learns, send = self._tables(), torch.is_grad_enabled(), None
        self._learns |= learns
        if learns:
            if self._returns is None:  # nobody called `begin` with gradients enabled
                self._lay_way()
            assert self._returns is not None
            versions = [version_of(parameter) for parameter in self.parameters]
            back = partial(self._send_back, self._gathered, self._rows, self.owned, versions)
            tables = list(materialise(self._aliases, tables, self._returns, back))
            if any(self._returns.learn):
                send = partial(self._send_by_plan, self._returns, back)
        named = {f"experts.{name}": table for name, table in zip(self.names, tables, strict=True)}
        y = torch.func.functional_call(WithExperts(self.experts), named, (use, send))
        if self.rematerialises:
            if learns:
                assert isinstance(y, Tensor)
                y = again(y, self._fetch_again)
            # The last layer's backward comes at once, so its replicas stay.
            if not (learns and (after is None or recomputes)):
                self._release()
        # In a plan's step the link is free for the next layer's only when this one's rows are through.
        if self.travel == "in turns" and after is not None and not recomputes:
            after.fetch()
        if self.clocked and not recomputes:
            self._ended.note(self._device)
        return y

    def _send_by_plan(self, returns: Returns, back: SendBack, grads: Sequence[Tensor]) -> SparseWork:
        returns.sent = True  # autograd need not do it
        work = returns.send(back, grads)
        before = self.neighbours[0]
        if self.rematerialises and before is not None:
            before.fetch()
        return work

    def wait(self) -> None:
        """Waits until no layer's experts or gradients are on their way; raises what went wrong with a transfer."""
        if self.sparse is not None:
            self.sparse.wait()

    def idle_s(self) -> float:
        """Seconds of the last forward between the experts before, or the model's beginning, and this layer's turn; 0
        where its turn came first."""
        before = self.neighbours[0]
        return max(0.0, self._came.after(self._start if before is None else before._ended))

    def take_load(self) -> NDArray[np.int64]:
        """[E]: rows of this rank's tokens that each expert got since the last call."""
        load_E, self._load_E = self._load_E, np.zeros_like(self._load_E)
        return load_E

    def _correct(self, wanted: Placement) -> tuple[Transfer, ...]:
        """Makes room for the replicas that a placement has more, and returns their transfers; those that it lacks send
        no gradients. Collective."""
        if wanted == self.now:
            return ()
        self.arrive()
        more = gather(self.now.both(wanted), wanted, self.nodes)
        stays = tuple(one for one in self._gathered if wanted.holds_EW[one.expert, one.target])
        self._add(wanted)
        self._gathered = chained(stays, more)
        return more

    def _send_back(
        self,
        gathered: tuple[Transfer, ...],
        rows: dict[int, int],
        owned: int,
        versions: list[int],
        grads: Sequence[Tensor],
    ) -> SparseWork:
        self.learned = True
        # Gradients of old parameters must not go to new ones.
        if versions != [version_of(parameter) for parameter in self.parameters]:
            raise RuntimeError(
                "experts have changed between a forward pass and its backward pass; call backward() before "
                "optimizer.step()"
            )
        # Memory of replicas is free once no gradient of this layer needs them.
        if self.rematerialises:
            self._release()
        if not gathered:
            return SparseWork()
        assert self.sparse is not None
        during = None
        if self.travel != "by tasks":
            during = span(self.recorder, "sparse reduce-scatter", kind=REDUCE, resource="inter", phase="backward")
        work = self.sparse.reduce(reduce(gathered), rows, grads, owned, during)
        self.sent_bytes += work.sent_bytes
        return work

    def _fetch_again(self) -> None:
        """Fetches replicas for the backward of a forward which gave them back. Collective."""
        self.arrive()
        before = self.neighbours[0]
        if before is not None and self.travel != "in turns":
            before.fetch()
