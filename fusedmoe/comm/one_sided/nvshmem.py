"""NVSHMEM between the ranks of a group: the symmetric heap over GPUs of one node or many.

The library that csrc/nvshmem is built into lies beside this file (`make nvshmem`); it is loaded when it is needed, and
NVSHMEM from its pip package with it. A process takes part in one NVSHMEM job: that of the group whose heap it opens
first, or one that other code has begun (PyTorch does), which must then span exactly the group. Heaps of the same ranks
share it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided.heap import Heap, no_gpu, not_for_torch
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.libraries import HOW_TO_INSTALL, nvshmem_bitcode, nvshmem_home, nvshmem_packages
from fusedmoe.kernels.one_sided import Network
from fusedmoe.threads import LOOK_S, Helper

T = TypeVar("T")

LIBRARY = Path(__file__).with_name("libfusedmoe_nvshmem.so")
PREFIX = "fusedmoe_nvshmem_"

# The arguments of each function, as csrc/nvshmem/fusedmoe_nvshmem.h has them. All return a status but the last two.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "probe": (),
    "version": (POINTER(c_int), POINTER(c_int)),
    "unique_id": (c_void_p, c_size_t),
    "init": (c_void_p, c_size_t, c_int, c_int),
    "adopt": (),
    "finalize": (),
    "state": (POINTER(c_int), POINTER(c_int), POINTER(c_int), c_void_p),
    "allocate": (c_size_t, POINTER(c_void_p)),
    "free": (c_void_p,),
    "peer_pointer": (c_void_p, c_int, POINTER(c_void_p)),
    "put_signal": (c_void_p, c_void_p, c_size_t, c_void_p, c_uint64, c_int, c_void_p),
    "wait": (c_void_p, c_uint64, c_void_p),
    "barrier": (c_void_p,),
    "register_module": (c_void_p,),
    "modules": (),
    "last_error": (),
}

_ID_BYTES = 128
_CLOSED = 0
_BUILD = "in the sources of fusedmoe: make nvshmem"


class _Failed(Exception):
    """A function of the library that returned no 0; the text is its last error."""


class Library:
    """The C library; `call("allocate", …)` raises `_Failed` where the function fails."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        for name, arguments in FUNCTIONS.items():
            function = getattr(functions, PREFIX + name)
            function.argtypes, function.restype = arguments, c_char_p if name == "last_error" else c_int

    def call(self, name: str, *arguments: Any) -> None:
        if getattr(self._functions, PREFIX + name)(*arguments):
            raise _Failed(self._functions.fusedmoe_nvshmem_last_error().decode())

    def versions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the versions of NVSHMEM that it was built with, and that is loaded."""
        built, loaded = (c_int * 3)(), (c_int * 3)()
        self.call("version", built, loaded)
        return tuple(built), tuple(loaded)

    def state(self) -> _State:
        owner, pe, pes, job = c_int(), c_int(), c_int(), ctypes.create_string_buffer(_ID_BYTES)
        self.call("state", owner, pe, pes, job)
        return _State(owner.value, pe.value, pes.value, job.raw)

    def unique_id(self) -> bytes:
        made = ctypes.create_string_buffer(_ID_BYTES)
        self.call("unique_id", made, _ID_BYTES)
        return made.raw

    def allocate(self, size: int) -> int:
        place = c_void_p()
        self.call("allocate", size, place)
        return place.value or 0

    def peer(self, address: int, pe: int) -> int:
        place = c_void_p()
        self.call("peer_pointer", address, pe, place)
        return place.value or 0


@dataclass(frozen=True)
class _State:
    """State of NVSHMEM in this process: who began it, this PE, the number of PEs, the id of our own job."""

    owner: int
    pe: int
    pes: int
    job: bytes


def why_not() -> str:
    """Returns why NVSHMEM cannot be used in this process, and what to do; "" where it can. Asks no other rank."""
    for reason in (no_gpu, _no_package, _no_library):
        if why := reason():
            return why
    try:
        load().call("probe")
    except _Failed as error:
        return str(error)
    return not_for_torch()


def _no_package() -> str:
    if nvshmem_home() is None:
        return f"NVSHMEM's package is not installed: {HOW_TO_INSTALL}"
    cuda, packages = torch.version.cuda, nvshmem_packages()
    if cuda and packages and int(cuda.split(".")[0]) not in packages:
        have = ", ".join(f"nvidia-nvshmem-cu{of}" for of in packages)
        return f"PyTorch is for CUDA {cuda}, but NVSHMEM's package is {have}: {HOW_TO_INSTALL}"
    return ""


def _no_library() -> str:
    if not LIBRARY.exists():
        return f"{LIBRARY.name} is not built; {_BUILD}"
    try:
        built, loaded = load().versions()
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded ({error}); {_BUILD}"
    except AttributeError as error:
        return f"{LIBRARY.name} is of other sources ({error}); {_BUILD}"
    if built[:2] != loaded[:2]:
        words = [".".join(map(str, version)) for version in (built, loaded)]
        return f"{LIBRARY.name} was built with NVSHMEM {words[0]}, and {words[1]} is loaded; {_BUILD}"
    return ""


@cache
def load() -> Library:
    """Loads the library, and NVSHMEM with it; raises OSError, or AttributeError where it lacks a function."""
    host = "libnvshmem_host.so.3"
    # The one that is loaded already (PyTorch brings one), else the package's: two would each have a job of their own.
    try:
        ctypes.CDLL(host, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        if home := nvshmem_home():
            ctypes.CDLL(str(home / "lib" / host), mode=ctypes.RTLD_GLOBAL)
    return Library(ctypes.CDLL(str(LIBRARY)))


def register_module(module: int) -> None:
    """Makes a CUDA module that Triton has loaded known to NVSHMEM, if it has device functions of it."""
    try:
        load().call("register_module", module)
    except _Failed as error:
        raise ConfigError(f"a kernel cannot use NVSHMEM: {error}") from error


class NvshmemHeap(Heap):
    """The heap over GPUs of several nodes. The host's waits for other ranks are bounded, and end with a `RankError`.

    Raises:
        ConfigError: NVSHMEM cannot be used on some rank; all ranks raise it, and it names them.
    """

    backend = "nvshmem"
    one_host = False

    def __init__(self, group: Group, device: torch.device) -> None:
        reason = why_not()
        state = None if reason else load().state()
        answers = all_gather_object(group, (reason, state), "opening NVSHMEM")
        if any(refusals := [why for why, _ in answers]):
            raise ConfigError(f"NVSHMEM over the {group}: {_each(group, refusals)}")
        super().__init__(group, device)
        self._library = load()
        self._pes = self._start([state for _, state in answers])
        self._mapped: list[int] = []

        from fusedmoe.kernels.triton.one_sided.network import tell_of_modules

        tell_of_modules(register_module)
        spare, addresses = self._map(8)
        # A peer without an address here is far: only NVSHMEM's functions reach it.
        if any(self._gather(not all(addresses))):
            pe_W = torch.tensor(self._pes, dtype=torch.int32, device=self.device)
            self.network = Network(pe_W, spare.view(torch.int64), nvshmem_bitcode())

    @staticmethod
    def why_not(device: torch.device) -> str:
        if device.type != "cuda":
            return "it is memory of CUDA GPUs; CPUs take host"
        if reason := why_not():
            return reason
        try:
            nvshmem_bitcode()
        except ConfigError as error:
            return str(error)
        return ""

    def _start(self, states: list[_State]) -> list[int]:
        """Begins a job or joins the one there is; returns the ranks' PEs."""
        group, operation = self.group, "opening NVSHMEM"
        if all(state.owner == _CLOSED for state in states):
            job = self._all(lambda: self._library.unique_id() if group.index == 0 else b"", operation)[0]
            try:
                self._bounded(lambda: self._library.call("init", job, _ID_BYTES, group.index, group.size), operation)
            except RankError as error:
                # A kernel's module may have been refused: no job stays open for that. The others have been told first,
                # for ending it waits for them.
                if isinstance(error.__cause__, _Failed):
                    with suppress(RankError):
                        self._bounded(lambda: self._library.call("finalize"), operation)
                raise
            return list(range(group.size))
        pes = [state.pe for state in states]
        alike = {(state.owner, state.pes, state.job) for state in states}
        if alike != {(states[0].owner, group.size, states[0].job)} or set(pes) != set(range(group.size)):
            places = ["is in none" if s.owner == _CLOSED else f"is PE {s.pe} of {s.pes}" for s in states]
            raise ConfigError(
                f"NVSHMEM over the {group}: a process takes part in one NVSHMEM job, and these ranks are in others: "
                f"{_each(group, places)}. Open it for the same ranks everywhere, or close the other one first."
            )
        self._all(lambda: self._library.call("adopt"), operation)
        return pes

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        operation = "allocating symmetric memory"
        address = self._bounded(lambda: self._library.allocate(size), operation)
        self._mapped.append(address)
        own = tensor_at(address, size, self.device)
        # Cleared before the gather below returns on any rank: a peer may put as soon as it has the address.
        own.zero_()
        self._settle(operation)
        addresses = self._all(lambda: [self._library.peer(address, pe) for pe in self._pes], operation)
        return own, addresses[self.group.index]

    def _free(self) -> None:
        """Frees the memory, and ends this use of the job; with the last use a job ends that was begun here."""
        operation = "closing NVSHMEM"
        # First this rank's stream, then all ranks: no kernel anywhere still uses the memory.
        self._settle(operation)
        all_gather_object(self.group, None, operation)
        for address in reversed(self._mapped):
            self._bounded(partial(self._library.call, "free", address), operation)
        self._bounded(lambda: self._library.call("finalize"), operation)

    def _settle(self, operation: str) -> None:
        """Waits on the host until the current stream is done: no longer than the job's time-out."""
        done, deadline = record(self.device), time.monotonic() + self.group.job.timeout_s
        pause = 1e-5
        while not done():
            self._look(operation, deadline)
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)

    def _all(self, call: Callable[[], T], operation: str) -> list[T]:
        """Returns what the call returns on each rank; where it fails on one, all raise it."""
        value: T | None = None
        try:
            value, reason = call(), ""
        except _Failed as error:
            reason = str(error)
        # A rank that waits in a collective of NCCL does not look at the board, so each tells the others how it ended.
        answers = all_gather_object(self.group, (reason, value), operation)
        for rank, (why, _) in zip(self.group.ranks, answers, strict=True):
            if why:
                raise self._error(operation, why, rank)
        return [value for _, value in answers]

    def _bounded(self, call: Callable[[], T], operation: str) -> T:
        """Returns what a call returns that waits for other ranks; where it fails, all ranks are told."""

        def work() -> T:
            make_current(self.device)
            return call()

        # In a thread of its own, which is left behind where the other ranks do not come.
        done = Helper(f"fusedmoe: {operation}").begin(work)
        deadline = time.monotonic() + self.group.job.timeout_s
        while True:
            with suppress(NoAnswer):
                done.exception(LOOK_S)
                break
            self._look(operation, deadline)
        try:
            return done.result()
        except _Failed as error:
            raise self._error(operation, str(error)) from error

    def _look(self, operation: str, deadline: float) -> None:
        """Raises, between two short waits, if a rank has failed or the time is up."""
        group = self.group
        verdict = group.board.read() if group.handle is not None else None
        if verdict is not None:
            raise group.ended(operation, verdict)
        if time.monotonic() > deadline:
            patience = f"{group.job.timeout_s:.0f} s"
            cure = "see the logs of the other ranks, or give Topology a larger timeout_s"
            raise self._error(operation, f"it did not end within {patience}; {cure}", late=True)

    def _error(self, operation: str, message: str, rank: int | None = None, late: bool = False) -> RankError:
        """Tells all ranks of an error of this rank, or of `rank`, and returns it. `late`: a wait lasted too long."""
        group = self.group
        if group.handle is None:
            return RankError(f"rank {group.job.rank}: {operation}: {message}")
        tell = group.board.blame if late else group.board.post
        verdict = tell(group.job.rank if rank is None else rank, operation, message)
        return group.ended(operation, verdict)


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """Returns device memory that is not PyTorch's as a uint8 tensor."""
    # As PyTorch asks for the description of somebody else's memory.
    described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)


def make_current(device: torch.device) -> None:
    """Gives this thread the GPU's context, which NVSHMEM looks for."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def record(device: torch.device) -> Callable[[], bool]:
    """Marks the current stream's end; returns a function that says whether the stream has reached it."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _each(group: Group, texts: list[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(group.ranks, texts, strict=True) if text)
