"""NVSHMEM between the ranks of a group: symmetric memory on GPUs of one node or many, and waits for it.

The library that csrc/nvshmem is built into lies beside this file (`make nvshmem`); it is loaded when it is needed, and
NVSHMEM from its pip package with it. A process takes part in one NVSHMEM job: that of the group for which it is opened
first, or one that other code has begun (PyTorch does), which must then span exactly the group. Where several are open
for the same ranks they share it.

Waits on the host for other ranks are bounded by the job's time-out and end with a `RankError`. Waits on a stream are
not bounded; `Nvshmem.settle` looks at the stream with a bound.
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
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided.heap import no_gpu, not_for_torch
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.libraries import HOW_TO_INSTALL, nvshmem_home, nvshmem_packages
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
    """The C library; `library.call("allocate", …)` raises `_Failed` where the function fails."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        for name, arguments in FUNCTIONS.items():
            function = getattr(functions, PREFIX + name)
            function.argtypes, function.restype = arguments, c_char_p if name == "last_error" else c_int

    def call(self, name: str, *arguments: Any) -> None:
        if getattr(self._functions, PREFIX + name)(*arguments):
            raise _Failed(self._functions.fusedmoe_nvshmem_last_error().decode())

    def versions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the versions of the NVSHMEM that it was built with, and of the one that is loaded."""
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
    """The state of NVSHMEM in this process: who began it, this PE, the number of PEs, the id of our own job."""

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
    """Loads the library, and NVSHMEM with it: the one that is loaded already (PyTorch brings one), else the package's.

    Raises:
        OSError: it does not exist, or cannot be loaded.   AttributeError: it lacks a function.
    """
    host = "libnvshmem_host.so.3"
    try:
        ctypes.CDLL(host, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        if home := nvshmem_home():
            ctypes.CDLL(str(home / "lib" / host), mode=ctypes.RTLD_GLOBAL)
    return Library(ctypes.CDLL(str(LIBRARY)))


def register_module(module: int) -> None:
    """Makes a CUDA module that Triton has loaded known to NVSHMEM, if it has device functions of it.

    Raises:
        ConfigError: NVSHMEM refuses it.
    """
    try:
        load().call("register_module", module)
    except _Failed as error:
        raise ConfigError(f"a kernel cannot use NVSHMEM: {error}") from error


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory of the same size on every rank of a group of W.

    Attributes:
        own: uint8, this rank's, cleared.
        table: [W] int64 on the device, the address of each rank's memory; 0 where this GPU cannot address it: only
            NVSHMEM's functions reach it, with an address in `own` and the rank's PE.
        pe_W: int32 on the device, each rank's PE.
    """

    own: Tensor
    table: Tensor
    pe_W: Tensor


class Nvshmem:
    """NVSHMEM, open for a group; as a context it closes itself. Everything but `put_signal` and `wait` is collective.

    Args:
        device: the GPU of this rank, None for the current one.
    Raises:
        ConfigError: it cannot be used on some rank; all ranks raise it, and it names them.
        RankError: NVSHMEM did not start, or not all ranks came in time.
    """

    def __init__(self, group: Group, device: torch.device | None = None) -> None:
        self.group = group
        reason = why_not()
        state = None if reason else load().state()
        answers = all_gather_object(group, (reason, state), "opening NVSHMEM")
        if refused := {rank: why for rank, (why, _) in zip(group.ranks, answers, strict=True) if why}:
            raise ConfigError(f"NVSHMEM over the {group}: {_each(refused)}")
        self.device = device or torch.device("cuda")
        if self.device == torch.device("cuda"):  # of this thread: other threads have a current GPU of their own
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._library = load()
        self._pes = self._start([state for _, state in answers])
        self._open: list[Memory] = []
        self._closed = False

        from fusedmoe.kernels.triton.one_sided.network import tell_of_modules

        tell_of_modules(register_module)

    def _start(self, states: list[_State]) -> list[int]:
        """Begins a job or joins the one there is; returns the ranks' PEs."""
        group, operation = self.group, "opening NVSHMEM"
        if all(state.owner == _CLOSED for state in states):
            job = self._all(lambda: self._library.unique_id() if group.index == 0 else b"", operation)[0]
            self._bounded(lambda: self._library.call("init", job, _ID_BYTES, group.index, group.size), operation)
            return list(range(group.size))
        pes = [state.pe for state in states]
        alike = {(state.owner, state.pes, state.job) for state in states}
        if alike != {(states[0].owner, group.size, states[0].job)} or set(pes) != set(range(group.size)):
            places = {
                rank: "is in none" if state.owner == _CLOSED else f"is PE {state.pe} of {state.pes}"
                for rank, state in zip(group.ranks, states, strict=True)
            }
            raise ConfigError(
                f"NVSHMEM over the {group}: a process takes part in one NVSHMEM job, and these ranks are in others: "
                f"{_each(places)}. Open it for the same ranks everywhere, or close the other one first."
            )
        self._all(lambda: self._library.call("adopt"), operation)
        return pes

    def allocate(self, size: int) -> Memory:
        """Symmetric memory of `size` bytes, the same on all ranks, cleared everywhere before anyone returns.

        Raises:
            ConfigError: ranks ask for different sizes, or for none. RankError: there is no room.
        """
        self._need_open()
        operation = "allocating symmetric memory"
        sizes = all_gather_object(self.group, size, operation)
        if len(set(sizes)) > 1 or size < 1:
            asked = _each({rank: f"{each} bytes" for rank, each in zip(self.group.ranks, sizes, strict=True)})
            raise ConfigError(f"{operation} over the {self.group}: all must ask for the same size, above 0: {asked}")
        address = self._bounded(lambda: self._library.allocate(size), operation)
        own = tensor_at(address, size, self.device)
        # Cleared before the gather below returns on any rank: a peer may put as soon as it has the address.
        own.zero_()
        self.settle(operation)
        every = self._all(lambda: [self._library.peer(address, pe) for pe in self._pes], operation)
        table = torch.tensor(every[self.group.index], dtype=torch.int64, device=self.device)
        memory = Memory(own, table, torch.tensor(self._pes, dtype=torch.int32, device=self.device))
        self._open.append(memory)
        return memory

    def free(self, memory: Memory) -> None:
        """Gives memory back, once no rank uses it any more; its tensor must not be touched afterwards."""
        self._need_open()
        operation = "freeing symmetric memory"
        # First this rank's stream, then all ranks: no kernel anywhere still uses the memory.
        self.settle(operation)
        self._meet(operation)
        self._open = [other for other in self._open if other is not memory]
        self._bounded(lambda: self._library.call("free", memory.own.data_ptr()), operation)

    def put_signal(self, dest: Tensor, source: Tensor, signal: Tensor, value: int, rank: int) -> None:
        """Copies `source`, on the current stream, to the place of `dest` on a rank of the group, then sets its signal.

        Args:
            dest, signal: contiguous parts of symmetric memory, int64 [1] for the signal. rank: its index in the group.
        """
        self._need_open()
        size = source.numel() * source.element_size()
        alike = size == dest.numel() * dest.element_size() and source.is_contiguous() and dest.is_contiguous()
        if not (size and alike):
            raise ConfigError("put_signal: source and dest must be contiguous and of the same size, above 0")
        places = dest.data_ptr(), source.data_ptr(), size, signal.data_ptr()
        operation = f"putting {size} bytes to rank {self.group.ranks[rank]}"
        pe, stream = self._pes[rank], self._stream()
        self._attempt(lambda: self._library.call("put_signal", *places, value, pe, stream), operation)

    def wait(self, signal: Tensor, value: int) -> None:
        """Waits, on the current stream, until this rank's signal is at least `value`, however long."""
        self._need_open()
        place = signal.data_ptr()
        self._attempt(lambda: self._library.call("wait", place, value, self._stream()), "waiting for a signal")

    def barrier(self) -> None:
        """Waits, on the current stream, for all ranks and for all that they have put, however long."""
        self._need_open()
        self._attempt(lambda: self._library.call("barrier", self._stream()), "a barrier of NVSHMEM")

    def settle(self, operation: str) -> None:
        """Waits on the host until the current stream is done, no longer than the job's time-out.

        Raises:
            RankError: a rank failed meanwhile, or the time is up.
        """
        done, deadline = record(self.device), time.monotonic() + self.group.job.timeout_s
        pause = 1e-5
        while not done():
            self._look(operation, deadline)
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)

    def close(self) -> None:
        """Waits for the stream and for the other ranks, frees what is still allocated, and ends this use of the job.

        With its last use a job ends that was begun here. A second call does nothing.
        """
        if self._closed:
            return
        for memory in reversed(self._open):
            self.free(memory)
        self._closed = True
        self.settle("closing NVSHMEM")
        self._meet("closing NVSHMEM")
        self._bounded(lambda: self._library.call("finalize"), "closing NVSHMEM")

    def __enter__(self) -> Nvshmem:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Leaves NVSHMEM after an error, when the other ranks may not come any more: it ends with the process."""
        self._closed = True

    def _need_open(self) -> None:
        if self._closed:
            raise ConfigError(f"NVSHMEM over the {self.group} is closed")

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def _meet(self, operation: str) -> None:
        all_gather_object(self.group, None, operation)

    def _all(self, call: Callable[[], T], operation: str) -> list[T]:
        """Returns what the call returns on each rank; where it fails on one, all raise it.

        A rank that waits in a collective of NCCL does not look at the board, so each tells the others how it ended.
        """
        value: T | None = None
        try:
            value, reason = call(), ""
        except _Failed as error:
            reason = str(error)
        answers = all_gather_object(self.group, (reason, value), operation)
        for rank, (why, _) in zip(self.group.ranks, answers, strict=True):
            if why:
                raise self._error(operation, why, rank)
        return [value for _, value in answers]

    def _attempt(self, call: Callable[[], T], operation: str) -> T:
        """Returns what the call returns; where it fails, all ranks are told."""
        try:
            return call()
        except _Failed as error:
            raise self._error(operation, str(error)) from error

    def _bounded(self, call: Callable[[], T], operation: str) -> T:
        """Returns what a call returns that waits for other ranks; where it fails, all ranks are told.

        The call runs in a thread of its own, which is left behind where the other ranks do not come.
        """

        def work() -> T:
            make_current(self.device)
            return call()

        done = Helper(f"fusedmoe: {operation}").begin(work)
        deadline = time.monotonic() + self.group.job.timeout_s
        while True:
            with suppress(NoAnswer):
                done.exception(LOOK_S)
                break
            self._look(operation, deadline)
        return self._attempt(done.result, operation)

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


class _Bytes:
    """Device memory that is not PyTorch's, as PyTorch asks for its description."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """Returns device memory that is not PyTorch's as a uint8 tensor."""
    return torch.as_tensor(_Bytes(address, size), device=device)


def make_current(device: torch.device) -> None:
    """Gives this thread the GPU's context, which NVSHMEM looks for."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def record(device: torch.device) -> Callable[[], bool]:
    """Marks the current stream's end; returns a function that says whether the stream has reached it."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _each(texts: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
