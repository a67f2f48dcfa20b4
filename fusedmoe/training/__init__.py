"""What a training loop calls besides the layers: gradients over ranks, clipping, checkpoints, PyTorch's wrappers."""

from fusedmoe.training.checkpoint import load_checkpoint, save_checkpoint
from fusedmoe.training.gradients import clip_grad_norm, sync_gradients
from fusedmoe.training.overlap import plan_step
from fusedmoe.training.replicas import broadcast_parameters
from fusedmoe.training.sharded import ShardedExperts
from fusedmoe.training.wrap import distributed_data_parallel, expert_parameter_names, fully_shard

__all__ = [
    "ShardedExperts",
    "broadcast_parameters",
    "clip_grad_norm",
    "distributed_data_parallel",
    "expert_parameter_names",
    "fully_shard",
    "load_checkpoint",
    "plan_step",
    "save_checkpoint",
    "sync_gradients",
]
