"""First performance runs of the Gluon form on a Hopper GPU; run `bench.gpu.verify` before.

    python -m bench.gpu.gluon_first time 7B-H256 …      tune the products of these shapes (default: all), both forms,
                                                        alone and with 16 multiprocessors occupied
    python -m bench.gpu.gluon_first stress 30B-H256 …   compare 100 runs of each form bitwise, Gluon's also with fewer
                                                        programs; and time them, alone and with 16 multiprocessors
                                                        occupied
    python -m bench.gpu.gluon_first host                host time of steps with tiny GPU work

All candidates are timed, verified or not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fusedmoe
from bench.gpu.case import make_case
from bench.gpu.clock import Step
from bench.gpu.kernels import fastest_of_forms, grouped_steps
from bench.gpu.shapes import SHAPES, Shape
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    Config,
    HopperConfig,
    Key,
    Variant,
    with_programs,
)

if TYPE_CHECKING:  # requires Triton
    from fusedmoe.kernels.triton.grouped.autotune import MultiprocessorHolder, Tuner


def variants() -> Iterator[Variant]:
    """Yield the bfloat16 SwiGLU variants without biases that have a Gluon form.

    Weight gradients are included with and without accumulation onto an earlier chunk.
    """
    for operation in OPERATIONS:
        activation = "swiglu" if operation in ("up", "dhidden") else ""
        gather = operation not in ("down", "dinput")
        for extra in {"dhidden": (True,), "dw1": (False, True), "dw2": (False, True)}.get(operation, (False,)):
            yield Variant(operation, "bfloat16", "ieee", activation, gather, extra, True, True)


@cache
def tuner_of_all(device: torch.device) -> Tuner:
    """Return a tuner that times every candidate, verified or not, without caching."""
    from fusedmoe.kernels.triton.grouped import autotune

    gpu = autotune.gpu_of(device)
    return autotune.make_tuner(device, partial(autotune.all_candidates, gpu), autotune.TuningRecord(None))


def time_forms(shapes: Sequence[Shape], device: torch.device) -> None:
    tuner = tuner_of_all(device)
    for shape, shared in product(shapes, (False, True)):
        for step in grouped_steps(make_case(shape, device), tuner.choose, shared, tuner.tuning_times_us):
            step.run(step.before())
            told = step.told()
            times = told.get("microseconds") or {}
            assert isinstance(times, dict)
            shown = ("-" if taken is None else f"{taken:.0f}" for taken in fastest_of_forms(times))
            name = f"{shape.name} {step.name:8}" + " beside another kernel" * shared
            print(f"{name} us in Triton, in Gluon: {', '.join(shown)}; {told.get('config')}", flush=True)
        torch.cuda.empty_cache()


def stress(shapes: Sequence[Shape], device: torch.device) -> None:
    """Print how many of 100 runs differ bitwise, which indicates a race, and the time of each form.

    Forms: Triton, Gluon with all programs, and Gluon with fewer. Times: alone, and while another stream occupies
    multiprocessors.
    """
    from fusedmoe.kernels.triton.grouped.autotune import NUM_OCCUPIED, MultiprocessorHolder

    holder = MultiprocessorHolder(device)
    free = torch.cuda.get_device_properties(device).multi_processor_count - NUM_OCCUPIED
    for shape, programs in product(shapes, (None, 0, free)):
        for step in grouped_steps(make_case(shape, device), partial(fastest, device, programs)):
            first = [tensor.clone() for tensor in _results(step)]
            differ = sum(not all(map(torch.equal, _results(step), first)) for _ in range(100))
            alone_ms, held_ms = _median_ms(step, None), _median_ms(step, holder)
            told = f"{alone_ms:.3f} ms alone, {held_ms:.3f} ms with {NUM_OCCUPIED} multiprocessors held"
            print(f"{shape.name} {step.name:8} {differ} of 100 differ; {told}: {step.told()['config']}", flush=True)
        torch.cuda.empty_cache()


def fastest(device: torch.device, programs: int | None, key: Key, launch: Callable[[Config], object]) -> Config:
    """Return the fastest configuration of the Gluon form with `programs` programs, or of Triton's form (None).

    If none of that form ran or tuning is off, return the tuner's choice.
    """
    from fusedmoe.kernels.triton.grouped import autotune

    tuner = tuner_of_all(device)
    chosen, times = tuner.choose(key, launch), tuner.tuning_times_us(key)
    tried = autotune.all_candidates(autotune.gpu_of(device), key)
    form = [one for one in tried if isinstance(one, HopperConfig) == (programs is not None) and str(one) in times]
    return with_programs(min(form, key=lambda one: times[str(one)], default=chosen), programs or 0)


def host(shapes: Sequence[Shape], device: torch.device) -> None:
    from bench.gpu.ranks import puts_layer

    gate, experts = fusedmoe.gates.TopK(experts=16, k=4), fusedmoe.experts.SwiGLU(64)
    layer = fusedmoe.MoELayer(256, gate, experts, device=device, dtype=torch.bfloat16)
    x_SM = torch.randn(64, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    case = make_case(Shape("host", 256, 256, 64, 16, 4, spread=True), device)

    def both() -> None:
        loss = layer(x_SM).sum() + layer.aux_loss
        loss.backward()

    calls: dict[str, Callable[[], object]] = {"layer, forward": lambda: layer(x_SM), "layer, both": both}
    for count in (2, 4):
        one = puts_layer(case, count)
        calls[f"{count} ranks by puts, forward"] = one.forward
        calls[f"{count} ranks by puts, both"] = lambda one=one: one.backward(one.forward(), case.dy_SM)  # type: ignore[misc]
    for name, call in calls.items():
        for _ in range(10):
            call()
        taken = []
        for _ in range(100):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        print(f"{name}: {1e6 * statistics.median(taken):.0f} us of the host", flush=True)


def _results(step: Step) -> list[Tensor]:
    found = step.run(step.before())
    return [one for one in (found if isinstance(found, tuple) else (found,)) if isinstance(one, Tensor)]


def _median_ms(step: Step, holder: MultiprocessorHolder | None) -> float:
    taken = []
    for _ in range(15):
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000)  # gives the host a lead
        if holder is not None:
            holder.hold()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step.run(step.before())
        end.record()
        if holder is not None:
            holder.release()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken[1:])


PIECES = {"time": time_forms, "stress": stress, "host": host}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.gluon_first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("piece", choices=list(PIECES))
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(shape.name for shape in SHAPES))
    given = parser.parse_args()
    if unknown := set(given.shapes) - {shape.name for shape in SHAPES}:
        parser.error(f"no shapes: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("requires a Hopper GPU, but PyTorch finds none")
    shapes = [shape for shape in SHAPES if not given.shapes or shape.name in given.shapes]
    PIECES[given.piece](shapes, torch.device("cuda", 0))


if __name__ == "__main__":
    main()
