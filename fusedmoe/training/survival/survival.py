"""`Survival`, which a training loop calls so that it goes on after a rank or a node is lost."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.recovery import Reader, find, load
from fusedmoe.training.survival.snapshot import JobNodes, Price, Snapshots, generation_of


class Survival:
    """Keeps a job's state in the memory of its nodes, each part on two of them (FlowMoE, Appendix K.3).

    For jobs that torchrun restarts (`--max-restarts`, `--nnodes MIN:MAX`). When a rank or a node is lost, the other
    ranks end with their error; torchrun meets with the nodes that are left and starts the program anew, in which

        survival = Survival(topology)
        extra = survival.restore(model, optimizer)  # None in a job that begins

    gives back the newest state that is whole, on any number of ranks and in any layout. In the loop,

        survival.refresh(step, model, optimizer, {"step": step})

    keeps a newer one: every step, or every n, after which at most n steps are done again, and none twice. A rank that
    is killed costs no state: its node's memory outlives it. A node that is lost takes one copy of each part with it.

    Collective over all ranks, as are all its methods.

    Args:
        memory: of this node; by default that of this rank's launcher, with which it goes.
    Attributes:
        step: of the state that was found, None without one.
        lost: keys of a newer state of which some part was on no node any more, by step.
        damaged: what of memory was not as it was written, and so was not taken for a copy; a warning named each.
    Raises:
        ConfigError: this system has no memory for it.
        RankError: a rank failed, or did not come.
    """

    def __init__(self, topology: Topology, memory: NodeMemory | None = None) -> None:
        self._memory, self._topology = NodeMemory() if memory is None else memory, topology
        self._earlier = self._memory.slots()  # unfinished ones, too
        last = max(map(generation_of, self._earlier), default=0)
        of_ranks = all_gather_object(topology.world, (self._memory.name, last), "comparing nodes")
        self._nodes = JobNodes.from_names([name for name, _ in of_ranks])
        # A memory that was given has an owner that removes it.
        if memory is None and self._nodes.speaks(topology.world.index):
            self._memory.keep()
        found = find(self._memory, topology, self._nodes)
        self._found, self.damaged = found.state, found.damaged
        self.step = None if self._found is None else self._found.step
        self.lost = {state.step: state.missing() for state in found.newer}
        # Larger than any before on any node: what this process keeps is newer than what was found, whatever its step.
        generation = max(last for _, last in of_ranks) + 1
        self._snapshots = Snapshots(self._memory, topology, self._nodes, generation)
        self._first = True

    @property
    def nodes(self) -> int:
        """Number of nodes of the job; with one, no part can be kept on two."""
        return self._nodes.count

    @property
    def price(self) -> Price:
        """Price of the last refresh, in bytes of this rank's node and link."""
        return self._snapshots.price

    def restore(self, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any] | None:
        """Loads the newest whole state, in place, and returns the `extra` of its refresh; None without one.

        Raises:
            ConfigError: it is of another model or optimizer, or all there was is damaged.
        """
        if self._found is None:
            if self.damaged:
                raise ConfigError(
                    f"going on from memory: the state of the job is damaged, and there is no other: "
                    f"{'; '.join(self.damaged)} is not as it was written. Go on from a checkpoint; the next refresh "
                    "removes the damaged state."
                )
            return None
        reader = Reader(self._found, self._memory, self._topology, self._nodes)
        return load(reader, model, optimizer, self._topology)

    def refresh(
        self, step: int, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any] | None = None
    ) -> None:
        """Keeps the state after so many steps; between two steps, never inside one.

        Args:
            extra: whatever else the run needs, the same on every rank; as for `save_checkpoint`.
        Raises:
            RankError: `extra` differs between ranks, a rank has no room, failed or did not come; the state kept before
                stands.
        """
        self._snapshots.write(step, model, optimizer, extra or {})
        if self._first:
            # Once all nodes have the new one: until then the state of before is the only whole one. Later refreshes
            # need no such wait: of two slots the older one is written.
            all_gather_object(self._topology.world, None, "keeping the first state")
            if self._nodes.speaks(self._topology.world.index):
                for slot in self._earlier:
                    self._memory.remove(slot)
            self._first, self._earlier, self._found = False, [], None

    def close(self) -> None:
        """Removes the state: the job is through. Collective; not for a job that ends with an error."""
        all_gather_object(self._topology.world, None, "ending the job")
        if self._nodes.speaks(self._topology.world.index):
            for slot in self._memory.slots():
                self._memory.remove(slot)
