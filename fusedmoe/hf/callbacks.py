"""Metrics of the routing in the logs of Hugging Face's `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from fusedmoe import MoELayer, Topology
from fusedmoe.compat.transformers import is_expert_parallel, is_registered, recorders_of
from fusedmoe.engine.recomputation import trains_tokens
from fusedmoe.errors import ConfigError
from fusedmoe.layers.load import expert_load
from fusedmoe.metrics import Collector, Metrics, RoutingCounters, Sink, Watched
from fusedmoe.schedule import PlanChooser
from fusedmoe.training import tune_model


class MetricsCallback(TrainerCallback):
    """Adds `fusedmoe.metrics.Metrics` of the model to the logs of training.

        Trainer(model, …, callbacks=[MetricsCallback()])

    They cover all steps since the last log, take one all-reduce each time (`logging_steps`), and reach the
    trainer's `state.log_history`, callbacks that come later (the one that prints), and the sinks. Those of `report_to`
    come earlier: for these put it first, `trainer.callback_handler.callbacks.insert(0, MetricsCallback())`.

    Of models of transformers, whoever computes their experts, these are the keys that experts' numbers and router
    logits give: "moe/max_vio", "moe/max_vio_worst", "moe/load_cv", "moe/dead_experts", "moe/diversity",
    "moe/router_entropy", "moe/balance_loss", "moe/z_loss", and with expert parallelism "moe/rank_rows". Of models with
    `MoELayer`s all of them.

    Args:
        sinks: take the metrics on rank 0, say `fusedmoe.metrics.JsonLines(path)`.
        per_layer: also those of each layer.
    Raises:
        ConfigError: when training begins, a model without experts.
    """

    def __init__(self, sinks: Sequence[Sink] = (), per_layer: bool = False) -> None:
        self._sinks, self._per_layer = tuple(sinks), per_layer
        self._metrics: Metrics | RouterMetrics | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._close()
        ours = any(isinstance(module, MoELayer) for module in model.modules())
        self._metrics = (Metrics if ours else RouterMetrics)(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # Logs of an evaluation, and the summary at the end, are of no steps.
        if self._metrics is None or "loss" not in logs:
            return
        values = self._metrics.collect(self._per_layer)
        logs.update(values)
        # The trainer has appended a copy of the logs to its history before it calls this.
        state.log_history[-1].update(values)
        if state.is_world_process_zero:
            for sink in self._sinks:
                sink.write(state.global_step, values)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


class RouterMetrics(Collector):
    """Metrics of a model of transformers, by the arguments of its experts and the outputs of its routers. Collective
    over all ranks of the job."""

    def __init__(self, model: Any) -> None:
        routers = _routers(model)
        self._hooks: list[Any] = []
        # Logits of the router that has run last, until its experts take them.
        self._logits: Tensor | None = None
        watched = {}
        for name, experts in registered_experts(model).items():
            if not hasattr(experts, "down_proj"):
                continue
            # A DTensor, of all experts, where they are split.
            down_proj = experts.down_proj
            counters = RoutingCounters(len(down_proj), down_proj.device)
            watched[name] = Watched(counters, _expert_parallel(down_proj))
            count = partial(self._count, counters)
            self._hooks.append(experts.register_forward_pre_hook(count, with_kwargs=True))
        router: nn.Module
        for router in model.modules():
            for kind, place in routers.items():
                # FSDP gives modules classes of its own, derived from theirs.
                if isinstance(router, kind):
                    self._hooks.append(router.register_forward_hook(partial(self._keep, place)))
        if not watched:
            raise ConfigError(
                f"MetricsCallback: {type(model).__name__} has no experts that transformers' registry serves"
            )
        # Of a world of one nothing has to be brought together, and there may be no process group.
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        super().__init__(watched, Topology.from_group(dist.group.WORLD) if several else Topology())

    def collect(self, per_layer: bool = False, per_expert: bool = False) -> dict[str, float]:
        """Collects as `Collector.collect` does, without speed and losses, which the trainer logs, and without drops,
        which do not occur."""
        untold = ("tokens_per_s", "dropped", "aux_loss")
        return {key: value for key, value in super().collect(per_layer, per_expert).items() if not key.endswith(untold)}

    def close(self) -> None:
        """Ends the counting."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, place: int, router: nn.Module, _: Any, outputs: Any) -> None:
        if router.training and trains_tokens() and isinstance(outputs, tuple):
            self._logits = outputs[place].detach()

    def _count(self, counters: RoutingCounters, experts: nn.Module, args: Any, kwargs: Any) -> None:
        if not (experts.training and trains_tokens()):
            return
        number_TK = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        # A router runs just before its experts, whatever wraps either of them (LoRA, activation checkpoints, hooks).
        logits_SE, self._logits = self._logits, None
        if logits_SE is not None and logits_SE.shape != (len(number_TK), counters.experts):
            # Logits of some other router: of another size, they cannot be these experts'.
            logits_SE = None
        if "_fusedmoe_padding" in vars(experts):
            # Masked tokens have no expert at all.
            real_T = (number_TK >= 0).any(1)
            number_TK, logits_SE = number_TK[real_T], None if logits_SE is None else logits_SE[real_T]
        with torch.no_grad():
            counts_E = expert_load(number_TK.long().clamp(max=counters.experts), counters.experts)
        counters.choices(number_TK, counts_E, logits_SE)
        counters.rows(counts_E)


def registered_experts(model: nn.Module) -> dict[str, Any]:
    """Returns modules of experts that transformers' registry serves, by name.

    The mark is asked of the module itself: wrappers around it answer for it, too.
    """
    return {name: module for name, module in model.named_modules() if is_registered(module)}


def named_input(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> dict[str, Tensor]:
    """Returns the arguments of registered experts by name."""
    return {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}


def _routers(model: Any) -> dict[type, int]:
    """Returns classes of routers, and the place of the logits in their outputs, as the models themselves say."""
    routers = {}
    for module in model.modules():
        for recorder in recorders_of(module, "router_logits"):
            if recorder is not None and hasattr(recorder, "target_class"):
                routers[recorder.target_class] = recorder.index
    return routers


def _expert_parallel(parameter: Tensor) -> int:
    """Returns over how many ranks the experts are split."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return mesh["ep"].size() if "ep" in (mesh.mesh_dim_names or ()) else 1


class PlanTuningCallback(TrainerCallback):
    """Measures plans while `Trainer` trains, and keeps to the fastest; see `fusedmoe.training.tune_model`.

        Trainer(model, …, callbacks=[PlanTuningCallback()])

    Where experts are not over ranks nothing travels, and it does nothing. Where a model is trained again it begins with
    what it has found.

    Args: as for `tune_model`.
    Attributes:
        tuning: what measures, while a model is trained over ranks and after.
    Raises:
        ConfigError: when training begins, a model without experts that transformers' registry serves, or whose tokens
            transformers itself sends.
    """

    def __init__(self, **given: Any) -> None:
        self._given = given
        self.tuning: PlanChooser | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        modules = registered_experts(model)
        travels = any(is_expert_parallel(module) for module in modules.values())
        self.tuning = tune_model(model, **self._given) if travels or not modules else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tuning is not None:
            self.tuning.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tuning is not None:
            self.tuning.__exit__(None)
