"""Metrics of a model's routing: counted on the device in every forward, brought together when they are asked for.

`Metrics(model).collect()` gives numbers by name; `JsonLines` and `TensorBoard` are places where these can go.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import ProfilerConfig, profiler_is_on
from fusedmoe.engine.dispatcher import recomputing
from fusedmoe.errors import ConfigError
from fusedmoe.layers.load import TERMS, RoutingCounters
from fusedmoe.layers.moe import MoELayer, number_layers
from fusedmoe.runtime.recorder import Recorder

__all__ = ["Collector", "JsonLines", "Metrics", "RoutingCounters", "Sink", "TensorBoard", "Watched"]

Floats = NDArray[np.float64]


class Watched(NamedTuple):
    """A layer that metrics are of."""

    counters: RoutingCounters
    # Ranks that its experts are split over, evenly and in order; 1 where they are not, or move.
    ranks: int = 1


class Collector:
    """Brings counters of layers together over the ranks. Making one is collective, and so is `collect`.

    Args:
        layers: by the name that their keys have.
        topology: of whose ranks.
        flops_per_token: FLOP of a token's forward and backward pass (six for each parameter that it meets), for "mfu".
        peak_flops: FLOP/s that a rank's device could do, for "mfu".
        exposed_s: seconds of communication that nothing hid since the last collection; None: nothing is known of it.
    Raises:
        ConfigError: no layers; one of the two numbers without the other, or not positive.
        RankError: other layers on other ranks.
    """

    def __init__(
        self,
        layers: Mapping[str, Watched],
        topology: Topology,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        exposed_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        if not layers:
            raise ConfigError("Metrics: the model has no layers with experts")
        numbers = flops_per_token, peak_flops
        if None in numbers and numbers != (None, None):
            raise ConfigError("Metrics: mfu takes both flops_per_token and peak_flops")
        if any(number is not None and not number > 0 for number in numbers):
            raise ConfigError(f"Metrics: flops_per_token and peak_flops must be positive, got {numbers}")
        sizes = {name: (layer.counters.experts, layer.ranks) for name, layer in layers.items()}
        # The sums of all layers travel as one tensor, so these must be the same on all ranks.
        topology.agree({"layers": sizes}, "Metrics")
        self._layers, self._topology, self._exposed_s = dict(layers), topology, exposed_s
        self._flops = None if flops_per_token is None or peak_flops is None else flops_per_token / peak_flops
        self._since_s = time.perf_counter()

    def collect(self, per_layer: bool = False, per_expert: bool = False) -> dict[str, float]:
        """Returns the metrics since the last collection, the same on all ranks, which all call it.

        One all-reduce, and the only wait for the device. Keys of what nothing was counted of are left out.

        Args:
            per_layer: also those of each layer, "moe/NAME/max_vio" and so on.
            per_expert: also the load of each expert, "moe/NAME/load/3": how often the tokens of all ranks chose it,
                drops included.
        """
        # Sums go where the group's collectives want them; alone, nothing is copied before the one wait.
        device = device_of(self._topology.world)
        if self._topology.size == 1:
            device = next(iter(self._layers.values())).counters.sums.device
        sums = torch.cat([layer.counters.sums.to(device) for layer in self._layers.values()])
        exposed_s = self._exposed_s()
        now_s = time.perf_counter()
        # Time is summed over ranks like the rest, with a count of those that know what was exposed.
        own = [now_s - self._since_s, 0.0 if exposed_s is None else exposed_s, float(exposed_s is not None)]
        sums = torch.cat([sums, torch.tensor(own, dtype=sums.dtype, device="cpu").to(device)])
        every_sum = all_reduce(self._topology.world, sums, operation="sum of metrics").cpu().numpy()
        self._since_s = now_s
        # Counting goes on in the same memory, which graphs may hold.
        for layer in self._layers.values():
            layer.counters.sums.zero_()
        return self._named(every_sum, per_layer, per_expert)

    def _named(self, sums: Floats, per_layer: bool, per_expert: bool) -> dict[str, float]:
        each: dict[str, dict[str, float]] = {}
        loads: dict[str, float] = {}
        # A layer that did not run in every forward has seen fewer tokens than the model.
        tokens, start = 0.0, 0
        for name, (counters, ranks) in self._layers.items():
            stop = start + len(counters.sums)
            each[name] = of_layer(sums[start:stop], counters.experts, ranks)
            tokens = max(tokens, float(sums[start + 2 * counters.experts]))
            if per_expert:
                chosen_E = sums[start : start + counters.experts].tolist()
                loads |= {f"moe/{name}/load/{expert}": load for expert, load in enumerate(chosen_E)}
            start = stop
        result = {}
        for key in dict.fromkeys(key for metrics in each.values() for key in metrics):
            values = [metrics[key] for metrics in each.values() if key in metrics]
            result[f"moe/{key}"] = sum(values) / len(values)
            # A mean hides one layer whose experts have collapsed.
            if key == "max_vio":
                result["moe/max_vio_worst"] = max(values)
        seconds, exposed_s, recorded = sums[start:].tolist()
        speed = tokens / max(seconds / self._topology.size, 1e-9)
        result["moe/tokens_per_s"] = speed
        if self._flops is not None:
            result["moe/mfu"] = speed * self._flops / self._topology.size
        if recorded:
            result["moe/exposed_s"] = exposed_s / recorded
        if per_layer:
            result |= {f"moe/{name}/{key}": value for name, metrics in each.items() for key, value in metrics.items()}
        return result | loads


class Metrics(Collector):
    """Metrics of a model's `MoELayer`s; training forwards count, once where activations are computed again.

        metrics = Metrics(model)
        for step, batch in enumerate(batches):
            …                                        # as before
            if step % 20 == 19:
                print(metrics.collect())             # {"moe/max_vio": 0.21, …}, on all ranks

    Over all tokens of all ranks since the last collection; c_e are the choices of expert e of E, drops included; the
    mean over the layers:

    - "moe/max_vio" = (max c − mean c) / mean c (Wang et al. 2024); "moe/max_vio_worst": of the layer where it is
      largest; "moe/load_cv" = std c / mean c; "moe/dead_experts": the share of experts with c = 0; "moe/diversity" =
      exp(H(c / Σc)) / E, 1 when even
    - "moe/dropped": the share of choices that found no room
    - "moe/rank_rows": rows that the busiest rank's experts receive over the mean of ranks, those of replicas added up;
      where experts are split over ranks, and do not move
    - "moe/pairs_per_token": (token, k) pairs that travelled for each token that did, which goes once to each rank that
      has experts for it: how many times fewer bytes that is than a row for each pair; not of compiled layers
    - of gates with router logits l: "moe/router_entropy", nats of softmax(l) of a token in the mean; "moe/z_loss", mean
      of logsumexp(l)²; "moe/balance_loss", E·Σ mean(softmax(l)_e)·share_e of a forward on a rank (1 when even), in the
      mean; whatever losses the gate has, without coefficients
    - "moe/aux_loss": the gate's own losses with their coefficients, mean of forwards and ranks
    - "moe/NAME/load/3" = c_3 of a layer, with `collect(per_expert=True)`
    - "moe/tokens_per_s", of all ranks; "moe/mfu" = tokens/s · flops_per_token / (ranks · peak_flops)
    - "moe/exposed_s": seconds in which rows travelled and this rank's layers computed nothing, in the first forward and
      backward pass of each layer since the last collection, in the mean of ranks; where rows travel between ranks, but
      not of layers in a compiled model

    The counters are float64 on the device of the layer; nothing but `collect` waits for it. `close` ends it.

    Args: see `Collector`; `model` has the layers, which are numbered in order for timelines and profiles.
    """

    def __init__(
        self, model: nn.Module, *, flops_per_token: float | None = None, peak_flops: float | None = None
    ) -> None:
        modules = model.named_modules()
        self._named_layers = {name or "layer": one for name, one in modules if isinstance(one, MoELayer)}
        layers = list(self._named_layers.values())
        topology = layers[0].topology if layers else Topology()
        if any(layer.topology.world.size != topology.world.size for layer in layers):
            raise ConfigError("Metrics: the model's layers are of topologies of different sizes; make one for each")
        if any(layer.load.counters is not None for layer in layers):
            raise ConfigError("Metrics: a layer has metrics already: close() these first, or use them")
        # Timelines that the sampler records tell layers apart by number.
        number_layers(layers)
        watched = {name: _watch(layer) for name, layer in self._named_layers.items()}
        numbers: dict[str, Any] = {"flops_per_token": flops_per_token, "peak_flops": peak_flops}
        super().__init__(watched, topology, exposed_s=lambda: self._sampler.exposed_s(), **numbers)
        # Once nothing is refused any more: it hooks the model.
        self._sampler = ExposedSampler(model, topology)
        for name, layer in self._named_layers.items():
            layer.load.counters = watched[name].counters

    def close(self) -> None:
        """Ends the counting, and takes its hooks from the model."""
        self._sampler.close()
        for layer in self._named_layers.values():
            layer.load.counters = None


class ExposedSampler:
    """Records the first training pass of each part of a model through which rows travel; the rest run as ever."""

    def __init__(self, model: nn.Module, topology: Topology) -> None:
        self._seen: set[nn.Module] = set()
        self._on: list[Any] = []
        self._recorder: Recorder | None = None
        if topology.ep.size * topology.esp.size == 1:
            return
        # One recorder for all modules: time is exposed only where no layer computed.
        self._recorder = Recorder(topology.rank, device=next(model.parameters()).device)
        for module in model.modules():
            if isinstance(module, (MoELayer, PipelinedBlocks)):
                self._on += [module.register_forward_pre_hook(self._begin)]
                self._on += [module.register_forward_hook(self._end, always_call=True)]

    def __getstate__(self) -> dict[str, Any]:
        # Hooks go with copies and pickles of a model, of which nobody collects anything.
        return {"_seen": set(), "_on": [], "_recorder": None}

    def close(self) -> None:
        for handle in self._on:
            handle.remove()

    def exposed_s(self) -> float | None:
        """Returns the seconds exposed since the last call, None where nothing was recorded; waits for the device."""
        if self._recorder is None or not self._seen:
            return None
        found = self._recorder.timeline()
        self._recorder.clear()
        self._seen.clear()
        return found.exposed_s()

    def _begin(self, module: Any, _: Any) -> None:
        # What is in a graph is not recorded.
        if torch.compiler.is_compiling():
            return
        if self._recorder is None or module.recorder is not None or not module.training:
            return
        # One pass of each module is enough: a recorder costs what it measures.
        if module not in self._seen and not recomputing():
            # Removed in `_end`, so that the other forwards of the module run without a recorder.
            self._seen.add(module)
            module.recorder = self._recorder

    def _end(self, module: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling() and module.recorder is self._recorder:
            module.recorder = None


def _watch(layer: MoELayer) -> Watched:
    device = next(layer.parameters()).device
    # Under a placement experts change ranks between two collections: rows by rank would mix placements.
    ranks = layer.topology.ep.size if layer.placed is None else 1
    return Watched(RoutingCounters(layer.gate.experts, device), ranks)


def of_layer(sums: Sequence[float] | Floats, experts: int, ranks: int) -> dict[str, float]:
    """Works out the metrics of one layer from its counters' sums (`RoutingCounters.sums`); without prefix, and without
    those of which there is nothing to say."""
    sums = np.asarray(sums, dtype=np.float64)
    chosen_E, kept_E = sums[:experts], sums[experts : 2 * experts]
    terms = dict(zip(TERMS, sums[2 * experts :].tolist(), strict=True))
    metrics: dict[str, float] = {}
    if chosen_E.any():
        mean, share_E = chosen_E.mean(), chosen_E / chosen_E.sum()
        # 0 · log 0 is 0: experts without rows add nothing.
        entropy = -np.sum(share_E[share_E > 0] * np.log(share_E[share_E > 0]))
        metrics |= {
            "max_vio": chosen_E.max() / mean - 1,
            "load_cv": chosen_E.std() / mean,
            "dead_experts": (chosen_E == 0).mean(),
            "diversity": np.exp(entropy) / experts,
            "dropped": 1 - kept_E.sum() / chosen_E.sum(),
        }
    if ranks > 1 and kept_E.any():
        # Experts lie evenly over the ranks, in order, and what a rank waits for is its busiest peer.
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


class Sink(Protocol):
    """Takes what was collected; on one rank, as all of them collect the same."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...


class JsonLines:
    """A line of JSON for each collection, {"step": 20, "moe/max_vio": …}, added to what the file has.

    Each line is on its way to the disk when `write` returns, so that a job that is killed leaves the lines before.

    Raises:
        OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        # Opened anew each time: a line that is written is not kept in a buffer of this process.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class TensorBoard:
    """Curves in TensorBoard, by `torch.utils.tensorboard`.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard needs its package ({error}): pip install tensorboard, or use JsonLines"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Writes what is kept."""
        self._writer.close()


@contextmanager
def trace(path: str | os.PathLike[str], model: nn.Module | None = None) -> Iterator[Path]:
    """Writes a trace of what runs inside, for ui.perfetto.dev and chrome://tracing.

        with fusedmoe.trace("step.json", model):
            model(x).sum().backward()

    Beside operators and kernels it shows what layers with experts do as ranges "fusedmoe: dispatch, layer 3, chunk 0,
    forward": gate, permute, dispatch, all-gather, expert, reduce-scatter, combine, unpermute. A profiler of your own
    (`torch.profiler.profile`) shows the same ranges; this one also has those of the threads on which a CPU overlaps
    what travels.

    Args:
        path: of the file; where there are several ranks each writes its own, step.rank0.json and so on. What is
            there is replaced; ".json.gz" compresses.
        model: whose `MoELayer`s are numbered in order, for the ranges; those of `fusedmoe.models` are already.
    Yields:
        The path of this rank's file, which is there afterwards; not if what runs inside raises.
    Raises:
        ConfigError: the folder is not there, or another profiler is on.
    """
    wanted = Path(os.path.expanduser(path))
    if not wanted.parent.is_dir():
        raise ConfigError(f"fusedmoe.trace: there is no folder {wanted.parent}; make it first")
    if profiler_is_on():
        raise ConfigError("fusedmoe.trace: a profiler is on already, and shows the same ranges: leave one of them out")
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
            torch.cuda.synchronize()  # what was issued inside belongs to it
    found.export_chrome_trace(str(wanted))
