"""Training goes on after a rank or a node is lost (FlowMoE, Appendix K.3): state in memory, twice.

`node_memory` keeps bytes on a host while its ranks come and go, `keeper` removes them, `buddies` says who keeps what,
`snapshot` puts a job's state there, `recovery` finds the newest whole one and hands it to other ranks, and `survival`
is what a training loop calls.
"""

from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival

__all__ = ["NodeMemory", "Survival"]
