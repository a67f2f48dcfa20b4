"""Gradient buckets of the dense parameters, all-reduced during backward in the order of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from weakref import ref

import torch
from torch import Tensor, nn

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.sharding import parameter_shardings
from fusedmoe.layers.moe import MoELayer
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.task import Task
from fusedmoe.threads import WorkerThread
from fusedmoe.training.replicated_parameters import MpLoss, Replica, gradient_divisor, list_replicas, local_part


@dataclass(eq=False)
class _BucketedParameter:
    """Parameter in the buckets.

    Attributes:
        gradient: passed to `add_gradient`; None if autograd accumulates it in `.grad`.
        is_ready: the gradient is complete.
        is_sent: the gradient was complete when its first bucket was reduced.
        is_complete: device scalar; whether every rank sent it.
    """

    replica: Replica
    divisor: int
    gradient: Tensor | None = None
    is_ready: bool = False
    is_sent: bool = False
    is_complete: Tensor | None = None

    @property
    def size(self) -> int:
        return self.replica.parameter.numel()

    @property
    def dtype(self) -> torch.dtype:
        return _reduction_dtype(self.replica.parameter)

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype, int]:
        """Ranks, dtype and divisor of the reduction. Adjacent parameters of one kind share a collective."""
        return self.replica.group.ranks, self.dtype, self.divisor


class GradientBuckets:
    """Gradients of a model's dense parameters in backward order, last layer first.

    A layer's dense parameters are all parameters between the previous layer's experts and its own, including its gate.
    Experts and parameters after the last experts are excluded.

    Buckets are filled in plan order, the same on every rank. If some rank lacks the gradient of a parameter when its
    first bucket is reduced, `sync_gradients(…, buckets=…)` reduces the gradient later. The host synchronises with the
    device only in `close`.

    Args:
        dense: parameters of each layer, to override the rule above (`PipelinedBlocks.dense_parameters`).
    Attributes:
        is_open: `reduce` and `begin` reduce buckets.
        layer_bytes: bytes sent per layer, in layer order and in at least float32.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        *,
        mp_loss: MpLoss = "summands",
        dense: Sequence[Sequence[nn.Parameter]] | None = None,
    ) -> None:
        self._topology = topology
        of_layers = [
            [_BucketedParameter(replica, gradient_divisor(replica, topology, mp_loss)) for replica in layer]
            for layer in _bucketed_parameters(model, topology, dense)
        ]
        self.layer_bytes = [sum(item.dtype.itemsize * item.size for item in layer) for layer in of_layers]
        self._items = [item for layer in reversed(of_layers) for item in reversed(layer)]
        self._by_parameter = {id(item.replica.parameter): item for item in self._items}
        own = ref(self)  # through a strong reference, the hooks would keep the parameters alive forever
        for item in self._items:
            item.replica.parameter.register_post_accumulate_grad_hook(lambda parameter: _mark_ready(own(), parameter))
        self.is_open = False
        self._recorder: Recorder | None = None
        self._position = 0, 0  # of the next bucket: item, element
        self._worker: WorkerThread | None = None
        self._future: Future[None] | None = None
        self._streams = Streams()
        self._stream: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_worker": None, "_future": None}

    def open(self, recorder: Recorder | None = None) -> None:
        """Open the buckets before the last backward pass of a step. Earlier passes reduce nothing.

        `recorder` records the tasks passed to `begin`.
        """
        self.is_open, self._position, self._recorder = True, (0, 0), recorder
        for item in self._items:
            item.is_ready, item.is_sent, item.is_complete, item.gradient = False, False, None, None

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Register a contiguous gradient before autograd accumulates it. It is reduced in place."""
        item = self._by_parameter.get(id(parameter))
        if item is not None:
            item.gradient, item.is_ready = gradient, True

    def reduce(self, task: Task) -> None:
        """All-reduce the next `task.size` bytes if the buckets are open. Collective."""
        if self.is_open and task.size is not None:
            self._reduce_bytes(task.size)

    def begin(self, tasks: Sequence[Task], wait_for_link: Callable[[], None] | None = None) -> None:
        """Start reducing buckets concurrently with the caller, in a thread or on a CUDA stream. Finish with `wait`.

        `wait_for_link` is called first; it blocks (on CUDA: the current stream) until the link is idle.
        """
        self.wait()
        if not self.is_open or not tasks:
            return
        streams = self._streams.on(device_of(self._topology.world))
        if streams is None:
            self._worker = self._worker or WorkerThread("fusedmoe gradients")
            self._future = self._worker.submit(partial(self._reduce_tasks, tasks, wait_for_link))
            return
        # NCCL requires one order of collectives on all ranks: no second thread (`fusedmoe/runtime/nccl.md`).
        self._stream = streams["inter"]
        self._stream.wait_stream(streams["compute"])
        with torch.cuda.stream(self._stream):
            self._reduce_tasks(tasks, wait_for_link)

    def wait(self) -> None:
        """Wait for the reductions of `begin` (on CUDA: on the current stream) and raise their errors."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._stream = None
        if self._worker is not None and self._future is not None:
            future, self._future = self._future, None
            self._worker.result(future)

    def close(self) -> set[int]:
        """Reduce the rest of a partly reduced parameter; return the ids of all reduced parameters. Collective."""
        self.wait()
        item, element = self._position
        if self.is_open and element:
            left = self._items[item]
            self._reduce_bytes((left.size - element) * left.dtype.itemsize)
            item = self._position[0]
        self.is_open = False
        for entry in self._items:
            entry.gradient = None
        done = {
            id(sent.replica.parameter): sent.is_complete for sent in self._items[:item] if sent.is_complete is not None
        }
        whole = torch.stack([*done.values()]).tolist() if done else []
        return {key for key, is_complete in zip(done, whole, strict=True) if is_complete}

    def _reduce_tasks(self, tasks: Sequence[Task], wait_for_link: Callable[[], None] | None) -> None:
        if wait_for_link is not None:
            wait_for_link()
        for task in tasks:
            kind, chunk, layer, phase, _ = task
            with span(self._recorder, kind, kind=kind, resource="inter", chunk=chunk, layer=layer, phase=phase):
                self.reduce(task)

    @torch.no_grad()
    def _reduce_bytes(self, size: int) -> None:
        for _, parts in groupby(self._next_parts(size), key=lambda part: part[0].kind):
            self._reduce_parts(list(parts))

    def _next_parts(self, size: int) -> Iterator[tuple[_BucketedParameter, int, int]]:
        """Yield (item, first element, end) of the parts that make up the next `size` bytes."""
        while size > 0 and self._position[0] < len(self._items):
            number, start = self._position
            item = self._items[number]
            end = min(item.size, start - -size // item.dtype.itemsize)
            self._position = (number, end) if end < item.size else (number + 1, 0)
            size -= (end - start) * item.dtype.itemsize
            yield item, start, end

    def _reduce_parts(self, parts: Sequence[tuple[_BucketedParameter, int, int]]) -> None:
        first_item = parts[0][0]
        group = first_item.replica.group
        sizes = [end - start for _, start, end in parts]
        begun = [item for item, start, _ in parts if start == 0]
        # Ranks without a gradient send zeros and no flag: the reduced flag counts the ranks with a gradient.
        buffer = torch.zeros(sum(sizes) + len(begun), dtype=first_item.dtype, device=device_of(group))
        *places, flags = buffer.split([*sizes, len(begun)])
        for item, flag in zip(begun, flags, strict=True):
            item.is_sent = item.is_ready  # read once: autograd may set it concurrently
            if item.is_sent:
                flag.fill_(1.0)
        for (item, start, end), place in zip(parts, places, strict=True):
            if item.is_sent:
                place.copy_(_flat_gradient(item)[start:end])
        all_reduce(group, buffer, operation="gradient all-reduce")
        for item, flag in zip(begun, flags, strict=True):
            item.is_complete = flag == group.size
        for (item, start, end), place in zip(parts, places, strict=True):
            if item.is_sent and item.is_complete is not None:
                own = _flat_gradient(item)[start:end]
                # Selected on the device: if some rank had no gradient, keep the local gradient for `sync_gradients`.
                own.copy_(torch.where(item.is_complete, place / item.divisor, own))


def _mark_ready(buckets: GradientBuckets | None, parameter: Tensor) -> None:
    if buckets is not None:  # the model may outlive the buckets
        buckets._by_parameter[id(parameter)].is_ready = True


def _reduction_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _flat_gradient(item: _BucketedParameter) -> Tensor:
    if item.gradient is not None:
        return local_part(item.gradient).view(-1)
    parameter = item.replica.parameter
    assert parameter.grad is not None
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return local_part(parameter.grad).view(-1)


def reduced_bytes(
    model: nn.Module, ranks: int, mp: int, dense: Sequence[Sequence[nn.Parameter]] | None = None
) -> tuple[list[int], int]:
    """Compute the bytes of dense gradients reduced with `ranks` ranks and MP groups of `mp`, from a model on one rank.

    Returns:
        `GradientBuckets.layer_bytes`, and the bytes in no bucket, which `sync_gradients` reduces after backward.
    """
    shardings, names = parameter_shardings(model), {id(parameter): name for name, parameter in model.named_parameters()}

    def local_bytes(parameter: nn.Parameter) -> int:  # a model on one rank is not split
        dim = shardings.get(names[id(parameter)], {}).get("mp")
        if ranks == (1 if dim is None else mp):
            return 0
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] = -(-shape[dim] // mp)
        return math.prod(shape) * _reduction_dtype(parameter).itemsize

    of_experts = {id(parameter) for layer in moe_layers(model) for parameter in layer.experts.parameters()}
    total = sum(local_bytes(parameter) for parameter in model.parameters() if id(parameter) not in of_experts)
    by_layer = _parameters_before_experts(model) if dense is None else dense
    layers = [sum(map(local_bytes, members)) for members in by_layer]
    return layers, total - sum(layers)


def _bucketed_parameters(
    model: nn.Module, topology: Topology, dense: Sequence[Sequence[nn.Parameter]] | None
) -> list[list[Replica]]:
    by_layer = _parameters_before_experts(model) if dense is None else dense
    ids_by_layer = [{id(parameter) for parameter in members} for members in by_layer]
    bucketed = [
        one for one in list_replicas(model, topology) if one.group.size > 1 and not (one.is_fsdp or one.has_local_name)
    ]
    return [[replica for replica in bucketed if id(replica.parameter) in ids] for ids in ids_by_layer]


def _parameters_before_experts(model: nn.Module) -> list[list[nn.Parameter]]:
    experts = {id(p): n for n, layer in enumerate(moe_layers(model)) for p in layer.experts.parameters()}
    parameters_by_layer: list[list[nn.Parameter]] = [[] for _ in set(experts.values())]
    layer = 0
    for parameter in model.parameters():
        if id(parameter) in experts:
            # Shared experts and other parameters after a layer's experts count towards the next layer.
            layer = experts[id(parameter)] + 1
        elif layer < len(parameters_by_layer):
            parameters_by_layer[layer].append(parameter)
    return parameters_by_layer


def moe_layers(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]
