"""What a training loop calls besides the layers: gradients over ranks, clipping, checkpoints, PyTorch's wrappers."""

from fusedmoe.training.activation_checkpoint import save_communication
from fusedmoe.training.checkpoint import load_checkpoint, save_checkpoint
from fusedmoe.training.copies import broadcast_parameters
from fusedmoe.training.data_parallel import (
    distributed_data_parallel,
    expert_parameter_names,
    fully_shard,
    sync_gradients,
)
from fusedmoe.training.grad_norm import clip_grad_norm
from fusedmoe.training.plan_tuning import PlanTuning
from fusedmoe.training.sharded_experts import ShardedExperts
from fusedmoe.training.step_plan import plan_step
from fusedmoe.training.survival import Survival

__all__ = [
    "PlanTuning",
    "ShardedExperts",
    "Survival",
    "broadcast_parameters",
    "clip_grad_norm",
    "distributed_data_parallel",
    "expert_parameter_names",
    "fully_shard",
    "load_checkpoint",
    "plan_step",
    "save_checkpoint",
    "save_communication",
    "sync_gradients",
]
