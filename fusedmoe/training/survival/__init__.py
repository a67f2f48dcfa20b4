"""Training goes on after a rank or a node is lost (FlowMoE, Appendix K.3): state in memory, twice.

`node_memory` keeps bytes on a host while its ranks come and go, and `keeper` removes them; `snapshot` says who keeps
what, and puts a job's state there; `survival`, which a training loop calls, finds the newest whole one and loads it.
"""

from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival

__all__ = ["NodeMemory", "Survival"]
