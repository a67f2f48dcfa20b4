"""Functions that a training loop calls besides the layers: gradients over ranks, clipping, checkpoints, wrappers."""

from fusedmoe.placement.hecate import LayerLoads
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.runtime.cache import choice_text
from fusedmoe.training.checkpoint import load_checkpoint, save_checkpoint
from fusedmoe.training.checkpoint_folder import saved_at
from fusedmoe.training.copies import broadcast_parameters, replicas
from fusedmoe.training.data_parallel import (
    KEPT_OPERATORS,
    distributed_data_parallel,
    expert_parameter_names,
    fully_shard,
    save_communication,
    sync_gradients,
)
from fusedmoe.training.earlier_formats import convert_checkpoint
from fusedmoe.training.grad_norm import clip_grad_norm
from fusedmoe.training.gradient_buckets import GradientBuckets, bucketed_bytes
from fusedmoe.training.optimizers import PerMatrix
from fusedmoe.training.plan_tuning import TUNED, tune_model, tune_step
from fusedmoe.training.sharded_experts import PLACEMENT_BALANCES, PLACEMENT_POLICIES, ShardedExperts
from fusedmoe.training.step_plan import PlannedStep, plan_step
from fusedmoe.training.survival import NodeMemory, Survival

__all__ = [
    "KEPT_OPERATORS",
    "PLACEMENT_BALANCES",
    "PLACEMENT_POLICIES",
    "TUNED",
    "GradientBuckets",
    "LayerLoads",
    "NodeMemory",
    "PerMatrix",
    "Placement",
    "PlacementCosts",
    "PlannedStep",
    "ShardedExperts",
    "Survival",
    "broadcast_parameters",
    "bucketed_bytes",
    "choice_text",
    "clip_grad_norm",
    "convert_checkpoint",
    "distributed_data_parallel",
    "expert_parameter_names",
    "fully_shard",
    "load_checkpoint",
    "plan_step",
    "replicas",
    "save_checkpoint",
    "save_communication",
    "saved_at",
    "sync_gradients",
    "tune_model",
    "tune_step",
]
