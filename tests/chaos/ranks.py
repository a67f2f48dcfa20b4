"""Processes that run jobs as ranks, one after another, with a fault on one of them, and are checked for leftovers."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedmoe.kernels import backend
from fusedmoe.layers.scheduled_exchange import _topologies
from tests.chaos.doors import LIBRARIES
from tests.chaos.faults import FAULTS, OF_INPUT, PLACES, Watcher
from tests.chaos.jobs import INPUTS, LAYOUTS, Rank, Spec, needs_puts
from tests.chaos.lies import LIES
from tests.lifetime import end_with

FIRED, ANSWER, CLEAN, PORT, END = "fired", "answer", "clean", "port", "end"


def tell(pipe: Connection, thing: Any) -> None:
    """Send plain pickles: those of `multiprocessing` leave tensors in shared memory."""
    pipe.send_bytes(pickle.dumps(thing))


def hear(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


@dataclass(frozen=True)
class Attack:
    """A fault on one rank: at the n-th call in a place, or of its input if there is no place.

    `stays`: the process survives an error, as in a notebook; otherwise it exits, as a program does.
    """

    fault: str
    place: str
    culprit: int
    number: int = 1
    seed: int = 0
    stays: bool = False


@dataclass(frozen=True)
class Order:
    """A job request to a rank. `attack`: None to count the calls of each place."""

    rank: int
    spec: Spec
    attack: Attack | None
    run: int
    port: int
    counts: bool = False


@dataclass
class Answer:
    """The outcome on a rank: a value, or the type, text and traceback of an error; and the time."""

    value: Any = None
    error: tuple[str, str, str] | None = None
    at_s: float = 0.0
    saved: int = 0
    calls: Counter[str] | None = None


def serve(pipe: Connection) -> None:
    """Main loop of a rank process. Native errors and on-demand tracebacks go to the first file it receives."""
    from tests import copied

    end_with(copied.PID)
    torch.set_num_threads(1)
    log = os.open(hear(pipe), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The first store leaves a pipe for libuv's signals in the process for good.
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    idle: Counter[str] | None = None
    while True:
        try:
            order = hear(pipe)
        except (EOFError, KeyboardInterrupt):
            return
        if order == PORT:  # this rank hosts the next job's store
            host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            tell(pipe, (PORT, host.port))
            continue
        patience_s, answer = order.spec.timeout_s, _work(pipe, order)
        ended_well = answer.error is None
        tell(pipe, (ANSWER, answer))
        ends = not ended_well and order.attack is not None and order.rank == order.attack.culprit
        if ends and not order.attack.stays:
            os._exit(1)
        del order, answer
        if ended_well:
            hear(pipe)  # all ranks are done: a successful program ends with the last rank
        host = None
        _end_job()
        if idle is None and ended_well:
            idle = held()
        tell(pipe, (CLEAN, _left(idle, patience_s) if idle is not None else {}))


def _work(pipe: Connection, order: Order) -> Answer:
    spec, attack = order.spec, order.attack
    mine = attack is not None and attack.culprit == order.rank
    answer = Answer()
    torch.manual_seed(order.rank)
    if needs_puts(spec):
        _interpret_puts()
    try:
        world = LAYOUTS[spec.layout].world
        server = dist.TCPStore("127.0.0.1", order.port, is_master=False, timeout=timedelta(seconds=30))
        store = dist.PrefixStore(f"run {order.run}", server)
        dist.init_process_group("gloo", store=store, rank=order.rank, world_size=world, timeout=timedelta(seconds=60))
        for module in LIBRARIES.get(LAYOUTS[spec.layout].door or "", ()):
            import_module(module)  # a first import takes longer than the topology's timeout_s
        dist.barrier()
        if order.counts:
            rank, watcher = Rank(order.rank, spec), Watcher(PLACES)
            answer.calls = watcher.calls
            with watcher():
                answer.value = rank.run()
        elif mine and attack is not None and attack.fault in OF_INPUT:
            fault_name, rng = attack.fault.split(",")[0], random.Random(attack.seed)
            # Defects of a single step strike in that step: a job may have measured the machine for seconds before it.
            rank = Rank(order.rank, spec, fault_name, rng, lambda: tell(pipe, (FIRED, time.monotonic())))
            if fault_name not in INPUTS and fault_name not in LIES and fault_name != "averager":
                rank.strikes()
            answer.value = rank.run()
        elif mine and attack is not None:
            fault = FAULTS[attack.fault]
            rank = Rank(order.rank, spec, attack.fault)

            def act() -> None:
                tell(pipe, (FIRED, time.monotonic()))
                fault.act()

            with Watcher({attack.place: PLACES[attack.place]}, (attack.place, attack.number), act)():
                answer.value = rank.run()
        else:
            rank = Rank(order.rank, spec)
            answer.value = rank.run()
    except SystemExit:
        raise
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        answer.at_s = time.monotonic()
        answer.error = (type(error).__name__, str(error), traceback.format_exc())
        sys.excepthook(type(error), error, error.__traceback__)  # as at a program's exit
        traceback.clear_frames(error.__traceback__)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if "rank" in locals():
        answer.saved = rank.saved
    return answer


def _end_job() -> None:
    """Clean up like the end of a process."""
    # After an error in a backward pass, PyTorch keeps the pending tasks, and so the graph, until the next backward
    # pass.
    torch.ones((), requires_grad=True).backward()
    _topologies.clear()  # integrations release them only at process exit
    torch._dynamo.reset()  # graphs hold the process groups of their collectives
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def held() -> Counter[str]:
    """Count resources of this process: threads and open files by kind, children, shared memory."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        found[f"thread {_read(task / 'comm')}"] += 1
        found["child"] += len(_read(task / "children").split())
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(file)
        except OSError:  # the listing's own descriptor
            continue
        found[f"descriptor {re.sub(r'[0-9]+', 'N', target)}"] += 1
    found["mapping"] = _read(Path("/proc/self/maps")).count("memfd:")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _left(idle: Counter[str], patience_s: float) -> dict[str, int]:
    """Count resources beyond those of an idle rank. Gloo waits up to ten seconds, or its time-out, for a connection."""
    deadline, pause = time.monotonic() + max(patience_s, 6.0) + 5.0, 0.005
    while (more := held() - idle) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
        gc.collect()
    if "thread python" in more:  # list their names
        more |= Counter(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    return dict(more)


def _interpret_puts() -> None:
    """Run the put and wait kernels in Triton's interpreter; all other code runs as on any CPU."""
    name = "fusedmoe.comm.one_sided.receive_buffers"
    if name in sys.modules:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    for module in [module for module in sys.modules if module.split(".")[0] == "triton" and "._C" not in module]:
        del sys.modules[module]  # it was imported to compile
    backend.INTERPRET = True
    import_module(name)
    backend.INTERPRET = False
