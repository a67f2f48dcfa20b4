"""Gradients of the dense parts in buckets, each reduced when a plan says so while the backward pass goes on."""

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
from fusedmoe.threads import Helper
from fusedmoe.training.copies import MpLoss, Replica, divisor, local_part, replicas


@dataclass(eq=False)
class _Item:
    """Parameter in the buckets.

    Attributes:
        gradient: the one that was given; None: it is where autograd puts it.
        ready: it is there.   sent: it was there when its first part was sent.
        whole: a scalar on the device: it was there on every rank.
    """

    replica: Replica
    divisor: int
    gradient: Tensor | None = None
    ready: bool = False
    sent: bool = False
    whole: Tensor | None = None

    @property
    def size(self) -> int:
        return self.replica.parameter.numel()

    @property
    def dtype(self) -> torch.dtype:
        return _sent_as(self.replica.parameter)

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype, int]:
        """Neighbours of one kind share a collective."""
        return self.replica.group.ranks, self.dtype, self.divisor


class GradientBuckets:
    """The gradients of a model's dense parts in the order of back-propagation, last layer first.

    A layer's dense part is what comes before its experts in the order of the model's parameters, back to the experts of
    the layer before; its gate belongs to it. Neither what comes after the last experts nor experts themselves are in
    them.

    Buckets are filled in the order in which plans run them, the same on every rank. A parameter whose gradient is not
    there on every rank when its first part goes is left out, and `sync_gradients(…, buckets=…)` reduces it. The host
    learns which these are at the end of the step, and waits for nothing before.

    Args:
        dense: each layer's parameters, where the model knows better (`PipelinedBlocks.dense_parameters`).
    Attributes:
        layer_bytes: of each layer, in the order of the layers, as they are sent (in at least float32).
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
        layers = _dense_parts(model, topology, dense)
        of_layers = [[_Item(replica, divisor(replica, topology, mp_loss)) for replica in layer] for layer in layers]
        self.layer_bytes = [sum(item.dtype.itemsize * item.size for item in layer) for layer in of_layers]
        self._items = [item for layer in reversed(of_layers) for item in reversed(layer)]
        # A plan counts bytes of parts, not parameters: `_place` walks through the items as buckets take them.
        self._by_parameter = {id(item.replica.parameter): item for item in self._items}
        # The garbage collector does not look into these hooks: one that held us would hold the parameters for ever.
        own = ref(self)
        # Autograd calls the hook once all gradients of a parameter have been added up in a pass.
        for item in self._items:
            item.replica.parameter.register_post_accumulate_grad_hook(lambda parameter: _note(own(), parameter))
        self._open = False
        self._recorder: Recorder | None = None
        self._place = 0, 0  # the item that the next bucket starts in, and the element
        self._helper: Helper | None = None
        self._working: Future[None] | None = None
        self._streams = Streams()
        self._beside: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_helper": None, "_working": None}  # copies have a thread of their own, if any

    def open(self, recorder: Recorder | None = None) -> None:
        """Opens the buckets: call it before the backward pass that ends the step, the last where several add up.

        Buckets of passes before it do nothing. `recorder` measures those that `begin` is given.
        """
        self._open, self._place, self._recorder = True, (0, 0), recorder
        # What earlier passes of the step have noted counts no more: gradients are whole after the last one only.
        for item in self._items:
            item.ready, item.sent, item.whole, item.gradient = False, False, None, None

    @property
    def opened(self) -> bool:
        """Tells that a step's last backward pass has begun, or is to."""
        return self._open

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes a gradient before autograd has it, in contiguous memory of its own: it is reduced in place."""
        item = self._by_parameter.get(id(parameter))
        # A parameter outside the dense parts has no item: `sync_gradients` reduces what autograd puts there.
        if item is not None:
            item.gradient, item.ready = gradient, True

    def reduce(self, task: Task) -> None:
        """Reduces the next `task.size` bytes. Collective."""
        if self._open and task.size is not None:
            self._reduce(task.size)

    def begin(self, tasks: Sequence[Task], behind: Callable[[], None] | None = None) -> None:
        """Reduces buckets beside what the caller does, in a thread, on CUDA on a stream; `wait` sees to the end of it.

        `behind`: waits until nothing else has the link any more (on CUDA the current stream does).
        """
        self.wait()
        if not self._open or not tasks:
            return
        streams = self._streams.on(device_of(self._topology.world))
        if streams is None:
            self._helper = self._helper or Helper("fusedmoe gradients")
            self._working = self._helper.begin(partial(self._reduce_all, tasks, behind))
            return
        # All of it is issued here: of several communicators NCCL asks for one order on all ranks, which two threads
        # would not keep (`fusedmoe/runtime/nccl.md`).
        self._beside = streams["inter"]
        self._beside.wait_stream(streams["compute"])  # gradients that are given were computed there
        with torch.cuda.stream(self._beside):
            self._reduce_all(tasks, behind)

    def wait(self) -> None:
        """Waits until what was begun is done (on CUDA the current stream waits). Raises what went wrong there."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
            self._beside = None
        if self._helper is not None and self._working is not None:
            working, self._working = self._working, None
            self._helper.result(working)

    def close(self) -> set[int]:
        """Ends the step: reduces the rest of a parameter that was begun; returns the ids of those that are done.

        Collective.
        """
        self.wait()
        item, element = self._place
        # A bucket may end inside a parameter: its rest goes now, so that `sync_gradients` takes whole ones only.
        if self._open and element:
            left = self._items[item]
            self._reduce((left.size - element) * left.dtype.itemsize)
            item = self._place[0]
        self._open = False
        for given in self._items:
            given.gradient = None
        done = {id(sent.replica.parameter): sent.whole for sent in self._items[:item] if sent.whole is not None}
        # The one wait of the host in a step, for all parameters together.
        whole = torch.stack([*done.values()]).tolist() if done else []
        return {key for key, all_have in zip(done, whole, strict=True) if all_have}

    def _reduce_all(self, tasks: Sequence[Task], behind: Callable[[], None] | None) -> None:
        if behind is not None:
            behind()
        for kind, chunk, layer, phase, size in tasks:
            with span(self._recorder, kind, kind=kind, resource="inter", chunk=chunk, layer=layer, phase=phase):
                self.reduce(Task(kind, chunk, layer, phase, size))

    @torch.no_grad()
    def _reduce(self, size: int) -> None:
        """Reduces the next `size` bytes, with a flag for each parameter that begins in them."""
        # Neighbours that the same ranks hold share a collective: most buckets are one.
        for _, parts in groupby(self._cut(size), key=lambda part: part[0].kind):
            self._reduce_together(list(parts))

    def _cut(self, size: int) -> Iterator[tuple[_Item, int, int]]:
        """Yields (item, first element, end) of the next `size` bytes, as far as there are any."""
        while size > 0 and self._place[0] < len(self._items):
            number, start = self._place
            item = self._items[number]
            end = min(item.size, start - -size // item.dtype.itemsize)  # whole elements, up
            self._place = (number, end) if end < item.size else (number + 1, 0)
            size -= (end - start) * item.dtype.itemsize
            yield item, start, end

    def _reduce_together(self, parts: Sequence[tuple[_Item, int, int]]) -> None:
        first = parts[0][0]
        group = first.replica.group
        sizes = [end - start for _, start, end in parts]
        begun = [item for item, start, _ in parts if start == 0]
        # Ranks without a gradient send zeros and no flag: the sum of flags says whether all had one, on the way.
        buffer = torch.zeros(sum(sizes) + len(begun), dtype=first.dtype, device=device_of(group))
        *places, flags = buffer.split([*sizes, len(begun)])
        for item, flag in zip(begun, flags, strict=True):
            item.sent = item.ready  # looked at once: autograd may go on beside this
            if item.sent:
                flag.fill_(1.0)
        for (item, start, end), place in zip(parts, places, strict=True):
            if item.sent:
                place.copy_(_flat(item)[start:end])
        all_reduce(group, buffer, operation="gradient all-reduce")
        for item, flag in zip(begun, flags, strict=True):
            item.whole = flag == group.size
        for (item, start, end), place in zip(parts, places, strict=True):
            if item.sent and item.whole is not None:
                own = _flat(item)[start:end]
                # Chosen on the device: where some rank had none, the own gradient stays for `sync_gradients`.
                own.copy_(torch.where(item.whole, place / item.divisor, own))


def _note(buckets: GradientBuckets | None, parameter: Tensor) -> None:
    """Notes that autograd has the gradient of a parameter."""
    if buckets is not None:  # the model may live on without them
        buckets._by_parameter[id(parameter)].ready = True


def _sent_as(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _flat(item: _Item) -> Tensor:
    """Returns the gradient, flat and in memory of its own."""
    if item.gradient is not None:
        return local_part(item.gradient).view(-1)
    parameter = item.replica.parameter
    assert parameter.grad is not None
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return local_part(parameter.grad).view(-1)


def bucketed_bytes(
    model: nn.Module, ranks: int, mp: int, dense: Sequence[Sequence[nn.Parameter]] | None = None
) -> list[int]:
    """Computes `GradientBuckets.layer_bytes` of a rank of a larger world, of a model that was made in a world of one.

    Args:
        ranks, mp: of that world.
        dense: as for `GradientBuckets`.
    """
    shardings, names = parameter_shardings(model), {id(parameter): name for name, parameter in model.named_parameters()}

    # In the world of one that made the model nothing is split, and nothing has a copy: sizes follow from shardings.
    def own_bytes(parameter: nn.Parameter) -> int:
        dim = shardings.get(names[id(parameter)], {}).get("mp")
        if ranks == (1 if dim is None else mp):
            return 0
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] = -(-shape[dim] // mp)
        return math.prod(shape) * _sent_as(parameter).itemsize

    return [sum(map(own_bytes, of)) for of in (_before_experts(model) if dense is None else dense)]


def _dense_parts(
    model: nn.Module, topology: Topology, dense: Sequence[Sequence[nn.Parameter]] | None
) -> list[list[Replica]]:
    """Lists the replicated parameters before the experts of each MoE layer, in order, or those that are given."""
    own = [{id(parameter) for parameter in of} for of in (_before_experts(model) if dense is None else dense)]
    bucketed = [one for one in replicas(model, topology) if one.group.size > 1 and not (one.managed or one.named)]
    return [[replica for replica in bucketed if id(replica.parameter) in of] for of in own]


def _before_experts(model: nn.Module) -> list[list[nn.Parameter]]:
    """Lists the parameters before the experts of each MoE layer, and after those of the layer before it, in order."""
    experts = {id(p): n for n, layer in enumerate(moe_layers(model)) for p in layer.experts.parameters()}
    found: list[list[nn.Parameter]] = [[] for _ in set(experts.values())]
    layer = 0
    for parameter in model.parameters():
        if id(parameter) in experts:
            # A shared expert, and all else that comes after the experts of a layer, counts to the next one.
            layer = experts[id(parameter)] + 1
        elif layer < len(found):
            found[layer].append(parameter)
    return found


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """Lists a model's MoE layers in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]
