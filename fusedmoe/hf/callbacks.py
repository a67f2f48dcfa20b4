"""Callbacks for Hugging Face's `Trainer`: routing metrics and plan tuning."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from fusedmoe import MoELayer, Topology
from fusedmoe.compat.transformers import is_expert_parallel, is_registered, recorders_of
from fusedmoe.engine.recomputation import is_counting_tokens
from fusedmoe.errors import ConfigError
from fusedmoe.layers.load import RoutingCounters, expert_load
from fusedmoe.metrics import Collector, LayerCounters, Metrics
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.training import tune_model


class MetricsCallback(TrainerCallback):
    """Log `fusedmoe.metrics.Metrics` of the model during training.

        Trainer(model, …, callbacks=[MetricsCallback()])

    Metrics cover all steps since the last log and take one all-reduce per log (`logging_steps`). They are added to
    `state.log_history` and to the logs that later callbacks receive. The callbacks of `report_to` are earlier; for
    them, insert this callback first: `trainer.callback_handler.callbacks.insert(0, MetricsCallback())`.

    Transformers models, with any experts implementation, report "moe/max_vio", "moe/max_vio_worst", "moe/load_cv",
    "moe/dead_experts", "moe/diversity", "moe/router_entropy", "moe/balance_loss", "moe/z_loss", and with expert
    parallelism "moe/rank_rows". Models with `MoELayer`s report all metrics.

    Args:
        per_layer: also report metrics of each layer.
    Raises:
        ConfigError: when training begins, for a model without experts.
    """

    def __init__(self, per_layer: bool = False) -> None:
        self._per_layer = per_layer
        self._metrics: Metrics | RouterMetrics | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._close()
        ours = any(isinstance(module, MoELayer) for module in model.modules())
        self._metrics = (Metrics if ours else RouterMetrics)(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # Evaluation logs and the final summary cover no steps.
        if self._metrics is None or "loss" not in logs:
            return
        values = self._metrics.collect(self._per_layer)
        logs.update(values)
        # The history already has a copy of the logs.
        state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


class RouterMetrics(Collector):
    """Metrics of a transformers model from its experts' inputs and its routers' outputs. Collective over the job."""

    def __init__(self, model: Any) -> None:
        routers = _routers(model)
        self._hooks: list[Any] = []
        # Logits of the last router that ran. Its experts run next and use them.
        self._logits: Tensor | None = None
        watched = {}
        for name, experts in find_experts(model).items():
            if not hasattr(experts, "down_proj"):
                continue
            # With expert parallelism a DTensor whose length is the number of all experts.
            down_proj = experts.down_proj
            counters = RoutingCounters(len(down_proj), down_proj.device)
            watched[name] = LayerCounters(counters, _expert_parallel(down_proj))
            count = partial(self._count_choices, counters)
            self._hooks.append(experts.register_forward_pre_hook(count, with_kwargs=True))
        router: nn.Module
        for router in model.modules():
            for kind, place in routers.items():
                # FSDP replaces module classes by derived ones.
                if isinstance(router, kind):
                    self._hooks.append(router.register_forward_hook(partial(self._store_logits, place)))
        if not watched:
            raise ConfigError(
                f"MetricsCallback: {type(model).__name__} has no experts that transformers' registry serves"
            )
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        super().__init__(watched, Topology.from_group(dist.group.WORLD) if several else Topology())

    def collect(self, per_layer: bool = False, per_expert: bool = False) -> dict[str, float]:
        """Return `Collector.collect` without speed and auxiliary loss (logged by the trainer) and drops (always 0)."""
        untold = ("tokens_per_s", "dropped", "aux_loss")
        return {key: value for key, value in super().collect(per_layer, per_expert).items() if not key.endswith(untold)}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _store_logits(self, place: int, router: nn.Module, _: Any, outputs: Any) -> None:
        if router.training and is_counting_tokens() and isinstance(outputs, tuple):
            self._logits = outputs[place].detach()

    def _count_choices(self, counters: RoutingCounters, experts: nn.Module, args: Any, kwargs: Any) -> None:
        if not (experts.training and is_counting_tokens()):
            return
        expert_TK = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        logits_SE, self._logits = self._logits, None
        if logits_SE is not None and logits_SE.shape != (len(expert_TK), counters.experts):
            logits_SE = None
        if "_fusedmoe_padding" in vars(experts):
            real_T = (expert_TK >= 0).any(1)
            expert_TK, logits_SE = expert_TK[real_T], None if logits_SE is None else logits_SE[real_T]
        with torch.no_grad():
            counts_E = expert_load(expert_TK.long().clamp(max=counters.experts), counters.experts)
        counters.count_choices(expert_TK, counts_E, logits_SE)
        counters.count_rows(counts_E)


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the expert modules that transformers' registry serves by name, without wrappers around them."""
    return {name: module for name, module in model.named_modules() if is_registered(module)}


def expert_inputs(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> dict[str, Tensor]:
    return {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}


def _routers(model: Any) -> dict[type, int]:
    """Return the router classes that the models declare, and the index of the logits in their outputs."""
    routers = {}
    for module in model.modules():
        for recorder in recorders_of(module, "router_logits"):
            if recorder is not None and hasattr(recorder, "target_class"):
                routers[recorder.target_class] = recorder.index
    return routers


def _expert_parallel(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    return mesh["ep"].size() if "ep" in (mesh.mesh_dim_names or ()) else 0


class PlanTuningCallback(TrainerCallback):
    """Measure plans during `Trainer`'s training and keep the fastest, with `fusedmoe.training.tune_model`.

        Trainer(model, …, callbacks=[PlanTuningCallback()])

    Does nothing without expert parallelism. Training the model again starts with the plans found before.

    Args:
        given: keyword arguments of `tune_model`.
    Attributes:
        tuning: the tuner, once training with expert parallelism has begun.
    Raises:
        ConfigError: when training begins, for a model without experts from transformers' registry, or whose tokens
            transformers itself sends.
    """

    def __init__(self, **given: Any) -> None:
        self._given = given
        self.tuning: PlanChooser | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        modules = find_experts(model)
        travels = any(is_expert_parallel(module) for module in modules.values())
        self.tuning = tune_model(model, **self._given) if travels or not modules else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tuning is not None:
            self.tuning.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tuning is not None:
            self.tuning.__exit__(None)
