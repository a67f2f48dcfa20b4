"""Routing metrics of a model: counted on the device in every forward pass, reduced over ranks on request."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import ProfilerConfig, is_profiler_active
from fusedmoe.engine.dispatcher import is_recomputing
from fusedmoe.errors import ConfigError
from fusedmoe.layers.load import COUNTER_NAMES, RoutingCounters
from fusedmoe.layers.moe import MoELayer, number_layers
from fusedmoe.runtime.recorder import Recorder

__all__ = ["Metrics"]

Floats = NDArray[np.float64]


class LayerCounters(NamedTuple):
    """A layer's counters, and over how many ranks its experts are evenly split (0 if uneven or dynamic)."""

    counters: RoutingCounters
    ranks: int


class Collector:
    """Reduces the counters of layers over ranks. Construction and `collect` are collective.

    Args:
        layers: by name, which becomes part of the keys.
        topology: the ranks to reduce over.
        flops_per_token, peak_flops: as for `Metrics`.
    Raises:
        ConfigError: no layers, or only one of the two FLOP numbers, or one that is not positive.
        RankError: layers differ between ranks.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerCounters],
        topology: Topology,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if not layers:
            raise ConfigError("Metrics: the model has no MoE layers")
        numbers = flops_per_token, peak_flops
        if None in numbers and numbers != (None, None):
            raise ConfigError("Metrics: mfu needs both flops_per_token and peak_flops")
        if any(number is not None and not number > 0 for number in numbers):
            raise ConfigError(f"Metrics: flops_per_token and peak_flops must be positive, got {numbers}")
        sizes = {name: (layer.counters.experts, layer.ranks) for name, layer in layers.items()}
        # The sums of all layers are reduced as one tensor: layers must be equal on all ranks.
        topology.require_equal_facts({"layers": sizes}, "Metrics")
        self._layers, self._topology = dict(layers), topology
        self._flops = None if flops_per_token is None or peak_flops is None else flops_per_token / peak_flops
        self._since_s = time.perf_counter()

    def collect(self, per_layer: bool = False, per_expert: bool = False) -> dict[str, float]:
        """Return the metrics since the last collection, equal on all ranks. Collective.

        One all-reduce and one device synchronization. Keys without data are left out.

        Args:
            per_layer: also return each layer's metrics, "moe/NAME/max_vio" and so on.
            per_expert: also return the number of choices of each expert, "moe/NAME/load/3", including dropped choices.
        """
        device = device_of(self._topology.world)
        if self._topology.size == 1:
            device = next(iter(self._layers.values())).counters.sums.device
        sums = torch.cat([layer.counters.sums.to(device) for layer in self._layers.values()])
        exposed = self.exposed()
        now_s = time.perf_counter()
        # Sums over ranks, with the number of ranks that have recorded exposed time.
        own = [now_s - self._since_s, *(exposed or (0.0, 0.0)), float(exposed is not None)]
        sums = torch.cat([sums, torch.tensor(own, dtype=sums.dtype, device="cpu").to(device)])
        every_sum = all_reduce(self._topology.world, sums, operation="sum of metrics").cpu().numpy()
        self._since_s = now_s
        # In place: CUDA graphs may refer to this memory.
        for layer in self._layers.values():
            layer.counters.sums.zero_()
        return self._values_by_name(every_sum, per_layer, per_expert)

    def exposed(self) -> tuple[float, float] | None:
        """Return the exposed communication since the last collection, as `ExposedSampler.exposed`; None if unknown."""
        return None

    def _values_by_name(self, sums: Floats, per_layer: bool, per_expert: bool) -> dict[str, float]:
        each: dict[str, dict[str, float]] = {}
        loads: dict[str, float] = {}
        # A layer that did not run in every forward pass has fewer tokens than the model.
        tokens, start = 0.0, 0
        for name, (counters, ranks) in self._layers.items():
            stop = start + len(counters.sums)
            each[name] = layer_metrics(sums[start:stop], counters.experts, ranks)
            tokens = max(tokens, float(sums[start + 2 * counters.experts]))
            if per_expert:
                chosen_E = sums[start : start + counters.experts].tolist()
                loads |= {f"moe/{name}/load/{expert}": load for expert, load in enumerate(chosen_E)}
            start = stop
        result = {}
        for key in dict.fromkeys(key for metrics in each.values() for key in metrics):
            values = [metrics[key] for metrics in each.values() if key in metrics]
            result[f"moe/{key}"] = sum(values) / len(values)
            # A mean hides a single collapsed layer.
            if key == "max_vio":
                result["moe/max_vio_worst"] = max(values)
        seconds, exposed_s, passes_s, recorded = sums[start:].tolist()
        speed = tokens / max(seconds / self._topology.size, 1e-9)
        result["moe/tokens_per_s"] = speed
        if self._flops is not None:
            result["moe/mfu"] = speed * self._flops / self._topology.size
        if recorded and tokens:
            result["moe/exposed_s"] = exposed_s / recorded
            result["moe/exposed_share"] = exposed_s / passes_s if passes_s else 0.0
        if per_layer:
            result |= {f"moe/{name}/{key}": value for name, metrics in each.items() for key, value in metrics.items()}
        return result | loads


class Metrics(Collector):
    """Metrics of a model's `MoELayer`s in training forward passes. Recomputed activations count once.

        metrics = Metrics(model)
        for step, batch in enumerate(batches):
            …                                        # unchanged training step
            if step % 20 == 19:
                print(metrics.collect())             # {"moe/max_vio": 0.21, …}, on all ranks

    Values cover all tokens of all ranks since the last collection. docs/guides/metrics.md lists them. With c_e choices
    of expert e of E, including dropped choices, and router logits l:

    - "moe/max_vio" = (max c − mean c) / mean c (Wang et al. 2024); "moe/load_cv" = std c / mean c
    - "moe/diversity" = exp(H(c / Σc)) / E, 1 if balanced
    - "moe/router_entropy": mean entropy of softmax(l) in nats; "moe/z_loss": mean of logsumexp(l)²;
      "moe/balance_loss": mean of E·Σ_e mean(softmax(l)_e)·c_e/Σc per forward pass and rank (1 if balanced)
    - "moe/mfu" = tokens/s · flops_per_token / (ranks · peak_flops)

    Counters are float64 on the layer's device; only `collect` synchronizes. `close` stops counting.

    Args:
        model: its layers are numbered in order for timelines and profiles.
        flops_per_token: FLOP per token of forward and backward (6 per active parameter), for "moe/mfu".
        peak_flops: peak FLOP/s of a rank's device, for "moe/mfu".
    Raises:
        ConfigError: no layers, layers of different topologies or with metrics already, or an invalid FLOP number.
        RankError: layers differ between ranks.
    """

    def __init__(
        self, model: nn.Module, *, flops_per_token: float | None = None, peak_flops: float | None = None
    ) -> None:
        modules = model.named_modules()
        self._named_layers = {name or "layer": one for name, one in modules if isinstance(one, MoELayer)}
        layers = list(self._named_layers.values())
        topology = layers[0].topology if layers else Topology()
        if any(layer.topology.world.size != topology.world.size for layer in layers):
            raise ConfigError(
                "Metrics: the model's layers have topologies of different sizes; use one Metrics for each"
            )
        if any(layer.load.counters is not None for layer in layers):
            raise ConfigError("Metrics: a layer already has metrics: use them, or close() them first")
        number_layers(layers)
        watched = {name: _make_layer_counters(layer) for name, layer in self._named_layers.items()}
        super().__init__(watched, topology, flops_per_token=flops_per_token, peak_flops=peak_flops)
        # Last: it hooks the model, and no error may follow.
        self._exposed_sampler = ExposedSampler(model, topology)
        for name, layer in self._named_layers.items():
            layer.load.counters = watched[name].counters

    def exposed(self) -> tuple[float, float] | None:
        return self._exposed_sampler.exposed()

    def close(self) -> None:
        self._exposed_sampler.close()
        for layer in self._named_layers.values():
            layer.load.counters = None


class ExposedSampler:
    """Records each communicating layer's first training pass, to measure communication while no layer computes."""

    def __init__(self, model: nn.Module, topology: Topology) -> None:
        self._recorded_modules: set[nn.Module] = set()
        self._hook_handles: list[Any] = []
        self._recorder: Recorder | None = None
        #: No layer communicates.
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self._is_local = all(layer.topology.ep.size * layer.topology.esp.size == 1 for layer in layers)
        if self._is_local:
            return
        # One recorder for all modules: time is exposed only if no layer computes.
        self._recorder = Recorder(topology.rank, device=next(model.parameters()).device)
        for module in model.modules():
            if isinstance(module, (MoELayer, PipelinedBlocks)):
                self._hook_handles += [module.register_forward_pre_hook(self._begin)]
                self._hook_handles += [module.register_forward_hook(self._end, always_call=True)]

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of the model are not measured.
        return {"_recorded_modules": set(), "_hook_handles": [], "_recorder": None, "_is_local": self._is_local}

    def close(self) -> None:
        for handle in self._hook_handles:
            handle.remove()

    def exposed(self) -> tuple[float, float] | None:
        """Return two durations of the passes recorded since the last call; None if unrecorded.

        The seconds in which communication ran and no layer computed, summed over layers; and from the start of the
        first layer's forward to the end of its backward. Synchronizes with the device.
        """
        if self._is_local:
            return 0.0, 0.0
        if self._recorder is None or not self._recorded_modules:
            return None
        found = self._recorder.timeline()
        self._recorder.clear()
        self._recorded_modules.clear()
        return found.exposed_s(), found.duration_s

    def _begin(self, module: Any, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._recorder is None or module.recorder is not None or not module.training:
            return
        # One pass per module: recording costs time.
        if module not in self._recorded_modules and not is_recomputing():
            self._recorded_modules.add(module)
            module.recorder = self._recorder

    def _end(self, module: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling() and module.recorder is self._recorder:
            module.recorder = None


def _make_layer_counters(layer: MoELayer) -> LayerCounters:
    device = next(layer.parameters()).device
    # With a dynamic placement, rows per rank would mix several placements.
    ranks = layer.topology.ep.size if layer.placed is None else 0
    return LayerCounters(RoutingCounters(layer.gate.experts, device), ranks)


def layer_metrics(sums: Sequence[float] | Floats, experts: int, ranks: int) -> dict[str, float]:
    sums = np.asarray(sums, dtype=np.float64)
    chosen_E, kept_E = sums[:experts], sums[experts : 2 * experts]
    terms = dict(zip(COUNTER_NAMES, sums[2 * experts :].tolist(), strict=True))
    metrics: dict[str, float] = {}
    if chosen_E.any():
        mean, share_E = chosen_E.mean(), chosen_E / chosen_E.sum()
        # 0 · log 0 = 0.
        entropy = -np.sum(share_E[share_E > 0] * np.log(share_E[share_E > 0]))
        metrics |= {
            "max_vio": chosen_E.max() / mean - 1,
            "load_cv": chosen_E.std() / mean,
            "dead_experts": (chosen_E == 0).mean(),
            "diversity": np.exp(entropy) / experts,
            "dropped": 1 - kept_E.sum() / chosen_E.sum(),
        }
    if ranks and kept_E.any():
        # Experts are split evenly over ranks, in order. A rank waits for its busiest peer.
        rows_W = kept_E.reshape(ranks, -1).sum(1)
        metrics["rank_rows"] = rows_W.max() / rows_W.mean()
    if terms["scored"]:
        metrics |= {
            "router_entropy": terms["entropy"] / terms["scored"],
            "balance_loss": terms["balance_loss"] / terms["scored"],
            "z_loss": terms["z_loss"] / terms["scored"],
        }
    if terms["sent"]:
        metrics["pairs_per_token"] = terms["pairs"] / terms["sent"]
    if terms["tokens"]:
        metrics["aux_loss"] = terms["aux_loss"] / terms["tokens"]
    return {key: float(value) for key, value in metrics.items()}


@contextmanager
def trace(path: str | os.PathLike[str], model: nn.Module | None = None) -> Iterator[Path]:
    """Write a trace of the enclosed code for ui.perfetto.dev and chrome://tracing.

        with fusedmoe.trace("step.json", model):
            model(x).sum().backward()

    In addition to operators and kernels, the trace has ranges for tasks of MoE layers ("fusedmoe: dispatch, layer 3,
    chunk 0, forward"): gate, permute, dispatch, all-gather, expert, reduce-scatter, combine, unpermute. Any
    `torch.profiler.profile` shows these ranges; this trace also includes the threads that overlap communication on a
    CPU.

    Args:
        path: output file; an existing file is replaced, ".json.gz" compresses. With several ranks, each writes its own
            file: "step.json" becomes step.rank0.json, step.rank1.json and so on.
        model: number its `MoELayer`s in order, for the ranges; models of `fusedmoe.models` are numbered already.
    Yields:
        The path of this rank's file. It is written at the end, unless the enclosed code raises.
    Raises:
        ConfigError: the folder does not exist, or another profiler is active.
    """
    wanted = Path(os.path.expanduser(path))
    if not wanted.parent.is_dir():
        raise ConfigError(f"fusedmoe.trace: folder {wanted.parent} does not exist; create it first")
    if is_profiler_active():
        raise ConfigError("fusedmoe.trace: another profiler is active and shows the same ranges; use only one of them")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        stem, dot, ending = wanted.name.partition(".")
        wanted = wanted.with_name(f"{stem}.rank{dist.get_rank()}{dot}{ending}")
    if model is not None:
        number_layers(module for module in model.modules() if isinstance(module, MoELayer))
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, experimental_config=ProfilerConfig(profile_all_threads=True)) as found:
        yield wanted
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # include kernels launched inside
    found.export_chrome_trace(str(wanted))
