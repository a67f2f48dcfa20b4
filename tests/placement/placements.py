"""Placements for tests: strategies of hypothesis, and the example of sharding and materialisation worked by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.traffic import Transfer

# A worked example beside Hecate's Figures 5 and 6. Of these the paper's text says only what they are of: the workflow
# of an iteration, in which shards are gathered, used, and gradients are reduced to them (Figure 5), and "two symmetric
# sparse collectives" for one placement (Figure 6, for that of Figure 4b). Their experts, ranks and numbers are in the
# pictures alone, so the definitions of section 3.1 are the paper's here, and all else is filled in:
#
# Three experts on four ranks, two a node. Rank 3 owns nothing, which the definitions allow: they ask for one owner of
# each expert. Expert 0 is the most asked for and goes everywhere, expert 2 goes to rank 0 only. The ways that experts
# take are this library's; the paper sends by grouped broadcasts and reduces.
NODES = Nodes(4, 2)
SHARDING = Placement.parse("0: 0\n1: 1\n2: 2\n3:")
MATERIALISED = Placement.parse("0: 0 +2\n1: 1 +0\n2: 2 +0\n3: +0")
#: Expert 0 crosses to node 1 once, and is passed on there.
GATHER = (Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0), Transfer(2, 2, 0, 0), Transfer(0, 2, 3, 1))
#: Rank 2 has rank 3's gradients of expert 0 before it sends its own: one sum crosses.
REDUCE = (Transfer(0, 3, 2, 0), Transfer(0, 1, 0, 1), Transfer(0, 2, 0, 1), Transfer(2, 0, 2, 1))

nodes = st.builds(lambda count, per_node: Nodes(count * per_node, per_node), st.integers(1, 4), st.integers(1, 4))


@st.composite
def placements(draw: st.DrawFn, of: Nodes, *, replicas: bool = True) -> Placement:
    """Any placement: ranks may own nothing, and hold everything."""
    experts = draw(st.integers(1, 7))
    owners = tuple(draw(st.lists(st.integers(0, of.ranks - 1), min_size=experts, max_size=experts)))
    seed, share = draw(st.integers(0, 2**32)), draw(st.sampled_from((0.0, 0.2, 0.6, 1.0)))
    holds_EW = np.random.default_rng(seed).random((experts, of.ranks)) < share
    return Placement.holding(owners, holds_EW & replicas)


@st.composite
def situations(draw: st.DrawFn, *, replicas: bool = True, most: int = 40) -> tuple[Placement, np.ndarray, Nodes]:
    """A placement, tokens [W, E] and the nodes."""
    where = draw(nodes)
    placement = draw(placements(where, replicas=replicas))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale_E = rng.integers(0, most + 1, placement.experts)
    return placement, rng.integers(0, scale_E + 1, (where.ranks, placement.experts)), where
