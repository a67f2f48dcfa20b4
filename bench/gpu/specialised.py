"""Products with specialised warps, which may stall or take the GPU from their process: checked and timed at last.

`python -m bench.gpu.specialised --spool FILE`, a process of its own: first whether they are right, then, shape by
shape, beside the form that has been chosen without them. One that fails is named "not used", and nothing else is lost.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu.case import make_case
from bench.gpu.clock import Clock, CudaClock, Step
from bench.gpu.notes import LOST, gpu_works
from bench.gpu.part import SILENCE_S, Outcome, Place, size
from bench.gpu.rehearsal import FakeClock
from bench.gpu.shapes import SHAPES, Shape
from bench.gpu.spool import Spool
from bench.gpu.suites import keep, rows_file

_SECONDS = 0.5
SUITE = "specialised"
# For a rehearsal: sizes that these products know.
_EVEN = Shape("even", 24, 64, 64, 6, 2)


def compare(place: Place) -> Outcome:
    """In a process of its own. What it did not come back from is not used."""
    file = rows_file(place)
    environment = {"TRITON_INTERPRET": "1"} if place.rehearsal else {}
    command = ["-m", "bench.gpu.specialised", "--spool", str(file)]
    before = len(Spool(file).records)
    ended = place.run(command, environment, silence_s=SILENCE_S, sign=lambda: size(file))
    spool = Spool(file)
    for work in [work for work in spool.unfinished() if work in spool.records[before:]]:
        word = f"not used: {ended.why or f'its process ended with {ended.code}'}"
        spool.add("specialised", shape=work["shape"], kernel=work["name"], word=word)
    keep(place)
    found = [record for record in spool.of("specialised") if record in spool.records[before:]]
    if not found and not ended.code:
        return Outcome("skipped", "this GPU has none")
    unused = {record["word"] for record in found if record["word"].startswith("not used")}
    if unused or ended.code != 0:
        word = "; ".join(sorted(unused)) or f"its process ended with {ended.code}"
        return Outcome("not used", word, ended.output[-8000:])
    faster = sum(record["measured_ms"] < record["beside_ms"] for record in found if "measured_ms" in record)
    return Outcome("passed", f"right; faster in {faster} of {len(found)} cases")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.specialised", description=__doc__)
    parser.add_argument("--spool", type=Path, required=True, help="file for what is found")
    options = parser.parse_args(arguments)
    spool = Spool(options.spool)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        clock: Clock = CudaClock(device, lambda step: spool.add("sign", name=step))
        run(spool, device, SHAPES, clock)
    else:
        run(spool, torch.device("cpu"), (_EVEN,), FakeClock(2.0, 1.0))


def run(spool: Spool, device: torch.device, shapes: tuple[Shape, ...], clock: Clock) -> None:
    """Both products at all shapes; where one is not right at the sizes of the check, not at any other."""
    faults: dict[str, str] = {}
    for shape in shapes:
        for kernel in ("down", "dinput"):
            with spool.work(SUITE, shape.name, kernel):
                try:
                    records = [*_compare(shape, kernel, device, clock, faults)]
                except Exception as error:
                    records = [{"word": f"not used: {type(error).__name__}: {error}"[:500]}]
                for record in records:
                    spool.add("specialised", shape=shape.name, kernel=kernel, **record)
                if not gpu_works():
                    raise SystemExit(LOST)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _compare(
    shape: Shape, kernel: str, device: torch.device, clock: Clock, faults: dict[str, str]
) -> Iterator[dict[str, object]]:
    from fusedmoe import ops
    from fusedmoe.kernels.triton.experts import make_call
    from fusedmoe.kernels.triton.grouped.call import GroupedCall
    from fusedmoe.kernels.triton.grouped.configs import Config, Key, candidates
    from fusedmoe.kernels.triton.grouped.correctness import check
    from fusedmoe.kernels.triton.grouped.product import product

    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    case = make_case(shape, device, dtype)
    layout, transposed = ops.order(case.expert_SK, shape.E), kernel == "down"
    rows = torch.randn((layout.rows, shape.H if transposed else 2 * shape.H), device=device, dtype=dtype)
    matrices = case.w2 if transposed else case.w1.view(shape.E, -1, shape.M)
    plain = make_call(layout, case.x_SM)
    variant = plain.variant(kernel, rows.shape[1], shape.M)
    if on_gpu:
        from fusedmoe.kernels.triton.grouped.autotune import tuner

        capability = torch.cuda.get_device_capability(device)
        tuner(device).leave_out(lambda config: config.specialised)
        configs = [one.config for one in candidates(kernel, dtype, capability, variant.even) if one.config.specialised]
    else:
        configs = [Config(32, 64, 32, 4, 1, 4, specialised=True)]
    for config in configs:
        name = f"{variant}, {config}"
        if name not in faults:
            faults[name] = check(variant, config, device, *(() if on_gpu else ((0, 1, 37), (64, 80))))
        if fault := faults[name]:
            yield {"config": str(config), "word": f"not used: {fault}"}
            continue

        def always(key: Key, launch: object, config: Config = config) -> Config:
            return config

        special = GroupedCall(layout, case.x_SM, always, True, plain.programs)
        steps = [
            Step(name, lambda _, call=call: product(call, kernel, rows, matrices, transposed))  # type: ignore[misc]
            for name, call in (("chosen", plain), ("specialised", special))
        ]
        times = clock.measure(steps, _SECONDS)
        beside_ms, ms = times["chosen"].median_ms, times["specialised"].median_ms
        yield {"config": str(config), "word": "right", "measured_ms": ms, "beside_ms": beside_ms}


if __name__ == "__main__":
    main()
