"""In-memory checkpoints on two nodes, to continue training after a rank or a node is lost (FlowMoE, Appendix K.3).

`node_memory` stores bytes on a host beyond the lifetime of its ranks, `keeper` removes them, `snapshot` writes a job's
state, and `survival` restores the newest complete state.
"""
