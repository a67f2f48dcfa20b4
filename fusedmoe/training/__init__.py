"""Training loop: gradient synchronisation, clipping, DDP and FSDP wrappers, checkpoints, recovery from failed nodes."""

from fusedmoe.placement.sharded_experts import ShardedExperts
from fusedmoe.training.checkpoint import load_checkpoint, save_checkpoint
from fusedmoe.training.data_parallel import (
    KEPT_OPERATORS,
    distributed_data_parallel,
    expert_parameter_names,
    fully_shard,
    save_communication,
    sync_gradients,
)
from fusedmoe.training.grad_norm import clip_grad_norm
from fusedmoe.training.optimizers import PerMatrix
from fusedmoe.training.plan_tuning import tune_model, tune_step
from fusedmoe.training.replicated_parameters import broadcast_parameters
from fusedmoe.training.step_plan import PlannedStep, plan_step
from fusedmoe.training.survival.survival import Survival

__all__ = [
    "KEPT_OPERATORS",
    "PerMatrix",
    "PlannedStep",
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
    "tune_model",
    "tune_step",
]
