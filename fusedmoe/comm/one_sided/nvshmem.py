"""NVSHMEM: the symmetric heap over GPUs of one or several nodes.

`make nvshmem` builds csrc/nvshmem into a library in this folder, loaded on first use. A process takes part in one
NVSHMEM job, started for the group of its first heap or by other code such as PyTorch. The job must span exactly the
group. Heaps of the same ranks share it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotDone
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
from fusedmoe.comm.one_sided.heap import Heap, no_gpu_reason, no_torch_cuda_reason
from fusedmoe.errors import TIMEOUT_CURE, ConfigError, RankError
from fusedmoe.kernels.libraries import HOW_TO_INSTALL, nvshmem_bitcode, nvshmem_home, nvshmem_packages
from fusedmoe.kernels.one_sided import Network
from fusedmoe.threads import POLL_S, WorkerThread

T = TypeVar("T")

LIBRARY = Path(__file__).with_name("libfusedmoe_nvshmem.so")
PREFIX = "fusedmoe_nvshmem_"

# Argument types, as in csrc/nvshmem/fusedmoe_nvshmem.h. All but the last two functions return a status.
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
_NOT_INITIALISED = 0
_HOW_TO_BUILD = "in the sources of fusedmoe: make nvshmem"


class _LibraryError(Exception):
    """The last error of a library function that returned a nonzero status."""


class Library:
    """The C library. `call("allocate", …)` raises `_LibraryError` on a nonzero status."""

    def __init__(self, functions: Any) -> None:
        self._ctypes_library = functions
        for name, arguments in FUNCTIONS.items():
            function = getattr(functions, PREFIX + name)
            function.argtypes, function.restype = arguments, c_char_p if name == "last_error" else c_int

    def call(self, name: str, *arguments: Any) -> None:
        if getattr(self._ctypes_library, PREFIX + name)(*arguments):
            raise _LibraryError(self._ctypes_library.fusedmoe_nvshmem_last_error().decode())

    def versions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the NVSHMEM versions that the library was built with and that is loaded."""
        built, loaded = (c_int * 3)(), (c_int * 3)()
        self.call("version", built, loaded)
        return tuple(built), tuple(loaded)

    def state(self) -> _ProcessState:
        owner, pe, pes, job = c_int(), c_int(), c_int(), ctypes.create_string_buffer(_ID_BYTES)
        self.call("state", owner, pe, pes, job)
        return _ProcessState(owner.value, pe.value, pes.value, job.raw)

    def unique_id(self) -> bytes:
        unique_id = ctypes.create_string_buffer(_ID_BYTES)
        self.call("unique_id", unique_id, _ID_BYTES)
        return unique_id.raw

    def allocate(self, size: int) -> int:
        pointer = c_void_p()
        self.call("allocate", size, pointer)
        return pointer.value or 0

    def peer(self, address: int, pe: int) -> int:
        pointer = c_void_p()
        self.call("peer_pointer", address, pe, pointer)
        return pointer.value or 0


@dataclass(frozen=True)
class _ProcessState:
    """This process's NVSHMEM: who initialised it, its PE, the number of PEs, and the job's id."""

    owner: int
    pe: int
    pes: int
    job: bytes


def unavailable_reason() -> str:
    for reason in (no_gpu_reason, _missing_package_reason, _missing_library_reason):
        if why := reason():
            return why
    try:
        load().call("probe")
    except _LibraryError as error:
        return str(error)
    return no_torch_cuda_reason()


def _missing_package_reason() -> str:
    if nvshmem_home() is None:
        return f"NVSHMEM's package is not installed: {HOW_TO_INSTALL}"
    cuda, packages = torch.version.cuda, nvshmem_packages()
    if cuda and packages and int(cuda.split(".")[0]) not in packages:
        have = ", ".join(f"nvidia-nvshmem-cu{version}" for version in packages)
        return f"PyTorch is for CUDA {cuda}, but NVSHMEM's package is {have}: {HOW_TO_INSTALL}"
    return ""


def _missing_library_reason() -> str:
    if not LIBRARY.exists():
        return f"{LIBRARY.name} is not built; {_HOW_TO_BUILD}"
    try:
        built, loaded = load().versions()
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded ({error}); {_HOW_TO_BUILD}"
    except AttributeError as error:
        return f"{LIBRARY.name} was built from other sources ({error}); {_HOW_TO_BUILD}"
    if built[:2] != loaded[:2]:
        words = [".".join(map(str, version)) for version in (built, loaded)]
        return f"{LIBRARY.name} was built with NVSHMEM {words[0]}, but {words[1]} is loaded; {_HOW_TO_BUILD}"
    return ""


@cache
def load() -> Library:
    """Load the library and NVSHMEM. Raises OSError, or AttributeError if a function is missing."""
    host = "libnvshmem_host.so.3"
    # PyTorch loads NVSHMEM too; two copies would run separate jobs.
    try:
        ctypes.CDLL(host, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        if home := nvshmem_home():
            ctypes.CDLL(str(home / "lib" / host), mode=ctypes.RTLD_GLOBAL)
    return Library(ctypes.CDLL(str(LIBRARY)))


def register_module(module: int) -> None:
    try:
        load().call("register_module", module)
    except _LibraryError as error:
        raise ConfigError(f"a kernel cannot use NVSHMEM: {error}") from error


class NvshmemHeap(Heap):
    """Heap over GPUs of several nodes. Host waits for other ranks are bounded and end with a `RankError`.

    Raises:
        ConfigError: on all ranks, if NVSHMEM cannot be used on some; names them.
    """

    backend = "nvshmem"
    is_single_host = False

    def __init__(self, group: Group, device: torch.device) -> None:
        reason = unavailable_reason()
        state = None if reason else load().state()
        answers = all_gather_object(group, (reason, state), "opening NVSHMEM")
        if any(refusals := [why for why, _ in answers]):
            raise ConfigError(f"NVSHMEM over the {group}: {_describe_ranks(group, refusals)}")
        super().__init__(group, device)
        self._library = load()
        self._pe_by_rank = self._initialise_or_join([state for _, state in answers])
        self._allocated_addresses: list[int] = []

        from fusedmoe.kernels.triton.one_sided.network import register_loaded_modules

        register_loaded_modules(register_module)
        spare, addresses = self._map(8)
        # A peer without an address is remote: only NVSHMEM functions reach it.
        if any(self._all_gather(not all(addresses))):
            pe_W = torch.tensor(self._pe_by_rank, dtype=torch.int32, device=self.device)
            self.network = Network(pe_W, spare.view(torch.int64), nvshmem_bitcode())

    @staticmethod
    def unavailable_reason(device: torch.device) -> str:
        if device.type != "cuda":
            return "it uses memory of CUDA GPUs; use host on CPUs"
        if reason := unavailable_reason():
            return reason
        try:
            nvshmem_bitcode()
        except ConfigError as error:
            return str(error)
        return ""

    def _initialise_or_join(self, states: list[_ProcessState]) -> list[int]:
        """Initialise NVSHMEM or join the existing job. Return the PE of each rank."""
        group, operation = self.group, "opening NVSHMEM"
        if all(state.owner == _NOT_INITIALISED for state in states):
            job = self._call_on_all_ranks(lambda: self._library.unique_id() if group.index == 0 else b"", operation)[0]
            try:
                self._call_with_timeout(
                    lambda: self._library.call("init", job, _ID_BYTES, group.index, group.size), operation
                )
            except RankError as error:
                # The library may have rejected a kernel module. Finalize waits for all ranks, so the error is posted
                # first.
                if isinstance(error.__cause__, _LibraryError):
                    with suppress(RankError):
                        self._call_with_timeout(lambda: self._library.call("finalize"), operation)
                raise
            return list(range(group.size))
        pes = [state.pe for state in states]
        jobs = {(state.owner, state.pes, state.job) for state in states}
        if jobs != {(states[0].owner, group.size, states[0].job)} or set(pes) != set(range(group.size)):
            texts = ["is in none" if s.owner == _NOT_INITIALISED else f"is PE {s.pe} of {s.pes}" for s in states]
            raise ConfigError(
                f"NVSHMEM over the {group}: a process takes part in one NVSHMEM job, but these ranks are in different "
                f"ones: {_describe_ranks(group, texts)}. Open it for the same ranks everywhere, or close the other."
            )
        self._call_on_all_ranks(lambda: self._library.call("adopt"), operation)
        return pes

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        operation = "allocating symmetric memory"
        address = self._call_with_timeout(lambda: self._library.allocate(size), operation)
        self._allocated_addresses.append(address)
        own = tensor_at(address, size, self.device)
        # Zeroed before the gather below: a peer may put as soon as it has the address.
        own.zero_()
        self._synchronize(operation)
        addresses = self._call_on_all_ranks(
            lambda: [self._library.peer(address, pe) for pe in self._pe_by_rank], operation
        )
        return own, addresses[self.group.index]

    def _free(self) -> None:
        """Free the memory and leave the job. The last heap finalizes a job that was initialised here."""
        operation = "closing NVSHMEM"
        # No kernel uses the memory after this rank's stream and then all ranks are synchronized.
        self._synchronize(operation)
        all_gather_object(self.group, None, operation)
        for address in reversed(self._allocated_addresses):
            self._call_with_timeout(partial(self._library.call, "free", address), operation)
        self._call_with_timeout(lambda: self._library.call("finalize"), operation)

    def _synchronize(self, operation: str) -> None:
        done, deadline = record_event(self.device), time.monotonic() + self.group.job.timeout_s
        pause = 1e-5
        while not done():
            self._poll_board(operation, deadline)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)

    def _call_on_all_ranks(self, call: Callable[[], T], operation: str) -> list[T]:
        value: T | None = None
        try:
            value, reason = call(), ""
        except _LibraryError as error:
            reason = str(error)
        # NCCL collectives do not read the board, so ranks gather the outcome.
        answers = all_gather_object(self.group, (reason, value), operation)
        for rank, (why, _) in zip(self.group.ranks, answers, strict=True):
            if why:
                raise self._post_error(operation, why, rank)
        return [value for _, value in answers]

    def _call_with_timeout(self, call: Callable[[], T], operation: str) -> T:
        """Return the result of a call that waits for other ranks. Posts a failure to all ranks."""

        def work() -> T:
            make_current(self.device)
            return call()

        done = WorkerThread(f"fusedmoe: {operation}").submit(work)
        deadline = time.monotonic() + self.group.job.timeout_s
        while True:
            with suppress(NotDone):
                done.exception(POLL_S)
                break
            self._poll_board(operation, deadline)
        try:
            return done.result()
        except _LibraryError as error:
            raise self._post_error(operation, str(error)) from error

    def _poll_board(self, operation: str, deadline: float) -> None:
        group = self.group
        verdict = group.board.read() if group.handle is not None else None
        if verdict is not None:
            raise group.verdict_error(operation, verdict)
        if time.monotonic() > deadline:
            timeout = f"{group.job.timeout_s:.0f} s"
            cure = f"see the logs of the other ranks, or {TIMEOUT_CURE}"
            raise self._post_error(operation, f"it did not complete within {timeout}; {cure}", is_timeout=True)

    def _post_error(self, operation: str, message: str, rank: int | None = None, is_timeout: bool = False) -> RankError:
        """Post an error of this rank (or of `rank`) and return it."""
        group = self.group
        if group.handle is None:
            return RankError(f"rank {group.job.rank}: {operation}: {message}")
        post = group.board.blame if is_timeout else group.board.post
        verdict = post(group.job.rank if rank is None else rank, operation, message)
        return group.verdict_error(operation, verdict)


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """Return device memory owned by other code as a uint8 tensor."""
    described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)


def make_current(device: torch.device) -> None:
    """Make the GPU's context current in this thread, as NVSHMEM requires."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def record_event(device: torch.device) -> Callable[[], bool]:
    """Return a function that is True once the current stream has reached this point."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _describe_ranks(group: Group, texts: list[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(group.ranks, texts, strict=True) if text)
