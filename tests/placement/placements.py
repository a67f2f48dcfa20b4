"""Hypothesis strategies for placements, and a worked example of sharding and materialisation."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import Transfer

# A worked example for Hecate's Figures 5 and 6. The paper's text names only their subjects: the workflow of an
# iteration, in which shards are gathered, used, and gradients are reduced to them (Figure 5), and "two symmetric
# sparse collectives" for one placement (Figure 6, for that of Figure 4b). The experts, ranks and numbers are in the
# pictures alone. The definitions of section 3.1 are the paper's; the rest of the example is made up:
#
# Three experts on four ranks, two a node. Rank 3 owns nothing: the definitions require only one owner of each expert.
# Expert 0 has the highest load and is replicated everywhere, expert 2 on rank 0 only. The routes of experts are this
# library's; the paper uses grouped broadcasts and reduces.
NODES = NodeLayout(4, 2)
SHARDING = Placement.parse("0: 0\n1: 1\n2: 2\n3:")
MATERIALISED = Placement.parse("0: 0 +2\n1: 1 +0\n2: 2 +0\n3: +0")
#: Expert 0 crosses to node 1 once, and is forwarded there.
GATHER = (Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0), Transfer(2, 2, 0, 0), Transfer(0, 2, 3, 1))
#: Rank 2 receives rank 3's gradients of expert 0 before it sends its own: one sum crosses nodes.
REDUCE = (Transfer(0, 3, 2, 0), Transfer(0, 1, 0, 1), Transfer(0, 2, 0, 1), Transfer(2, 0, 2, 1))

node_layouts = st.builds(
    lambda count, per_node: NodeLayout(count * per_node, per_node), st.integers(1, 4), st.integers(1, 4)
)


@st.composite
def placements(draw: st.DrawFn, of: NodeLayout, *, replicas: bool = True) -> Placement:
    """Draw any placement: a rank may own no expert or hold every expert."""
    experts = draw(st.integers(1, 7))
    owners = tuple(draw(st.lists(st.integers(0, of.num_ranks - 1), min_size=experts, max_size=experts)))
    seed, share = draw(st.integers(0, 2**32)), draw(st.sampled_from((0.0, 0.2, 0.6, 1.0)))
    holds_EW = np.random.default_rng(seed).random((experts, of.num_ranks)) < share
    return Placement.holding(owners, holds_EW & replicas)


@st.composite
def situations(draw: st.DrawFn, *, replicas: bool = True, most: int = 40) -> tuple[Placement, np.ndarray, NodeLayout]:
    """Draw a placement, token counts [W, E] and the nodes."""
    where = draw(node_layouts)
    placement = draw(placements(where, replicas=replicas))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale_E = rng.integers(0, most + 1, placement.experts)
    return placement, rng.integers(0, scale_E + 1, (where.num_ranks, placement.experts)), where
