"""The stand-in for Triton's driver records the launches that a GPU's driver would receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.marks import slowly

pytest.importorskip("triton")

from triton import knobs

from bench.aot import compiling, layers, standin
from bench.gpu.shapes import Shape
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.layout import offsets
from fusedmoe.kernels.triton.gather_sum import gather_rows
from fusedmoe.kernels.triton.grouped.configs import Variant, candidates, gluon_candidates
from fusedmoe.kernels.triton.layout import sort_pairs

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are interpreted here")

SHAPE = Shape("large enough to be tuned", 8192, 512, 1024, 8, 2, spread=True)


def some_launches() -> None:
    """Launch kernels that compile quickly, one with constants of every kind."""
    x_SM = torch.empty((100, 256), dtype=torch.bfloat16, device="meta")
    source_N, offsets_E1 = torch.empty(300, dtype=torch.int64, device="meta"), offsets(torch.empty(4, device="meta"))
    gather_rows(x_SM, source_N, offsets_E1)
    gather_rows(x_SM[:, 1:], source_N, offsets_E1)
    sort_pairs(torch.empty((3000, 2), dtype=torch.int64, device="meta"), 8, None, None)


@contextmanager
def compiling_driver(target: int) -> Iterator[list[bool]]:
    """Launch as Triton does, compiling on cache misses, up to the driver's calls.

    Yields whether each launch hit the cache.
    """
    hits: list[bool] = []
    driver: Any = standin.Driver(target, "a GPU")
    driver.launcher_cls = lambda source, metadata: lambda *arguments: None
    driver.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 2**20},
        load_binary=lambda *binary: (0, 0, 0, 0, 1024),
    )
    with ExitStack() as stack:
        stack.enter_context(standin.recording(target))
        stack.enter_context(patch.object(standin.triton.runtime.driver, "_active", driver))
        stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", None))
        listen = lambda cache_hit, **others: hits.append(cache_hit)  # noqa: E731
        stack.enter_context(patch.object(knobs.compilation, "listener", listen))
        yield hits


@pytest.mark.parametrize("target", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_launches_hit_cache_of_compiled_kernels(target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with standin.recording(target) as launches:
        some_launches()
    assert len(launches) == 4 and len(set(launches)) == 4
    done = [compiling.compile_one(launch, cubin_size) for launch in launches]
    assert not [one.error for one in done if one.error]
    assert not any(one.cached for one in done) and all(one.found > 1000 for one in done)
    assert all(compiling.compile_one(launch).cached for launch in launches)
    with compiling_driver(target) as hits:
        some_launches()
    assert hits == [True] * 4
    with compiling_driver(target) as hits:
        x_SM = torch.empty((100, 512), dtype=torch.float16, device="meta")
        gather_rows(x_SM, torch.empty(3, device="meta").long(), offsets(torch.empty(4, device="meta")))
    assert hits == [False]


def cubin_size(launch: standin.Launch, compiled: Any) -> int:
    return len(compiled.asm["cubin"])


@pytest.mark.slow
def test_compile_workers_report_only_broken_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with standin.recording(90) as launches:
        some_launches()
    broken = standin.Launch(launches[0].module, "nothing_kernel", 90, launches[0].data)
    done = {one.launch: one for one in compiling.compile_all([*launches, broken], workers=1)}
    assert set(done) == {*launches, broken}
    assert {launch for launch, one in done.items() if one.error} == {broken} and "nothing_kernel" in done[broken].error
    assert all(compiling.compile_one(launch).cached for launch in launches)


@pytest.mark.parametrize("target", [90, *slowly(80, 100)])
def test_recording_covers_every_candidate_and_layer_kernel(target: int) -> None:
    with standin.recording(target) as launches:
        layers.run(SHAPE, counts=(2,))
    tiles = {"up": set(), "dhidden": set(), "product": set(), "dweight": set()}  # type: ignore[var-annotated]
    gluon = set()
    for launch in launches:
        assert launch.target == target
        name = launch.kernel.removesuffix("_kernel")
        values, options = launch.arguments, launch.options
        if ".gluon." in launch.module:
            gluon.add((name, values["BM"], values["BN"], values["BK"], values["STAGES"]))
        elif name in tiles:
            bm, bn = (values.get(wide) or values[tall] for wide, tall in (("BM", "BP"), ("BN", "BQ")))
            tiles[name].add((bm, bn, values["BK"], options["num_warps"], options["num_stages"]))
    for name, operations in (("up", ["up"]), ("dhidden", ["dhidden"]), ("product", ["down", "dinput"])):
        configs = [one.config for op in operations for one in candidates(op, torch.bfloat16, standin.table_of(target))]
        assert {(c.bm, c.bn, c.bk, c.warps, c.stages) for c in configs} == tiles[name]
    named = {
        "up": "up",
        "down": "product",
        "dinput": "product",
        "dhidden": "dhidden",
        "dw1": "dweight",
        "dw2": "dweight",
    }
    half = Variant("", "bfloat16", "ieee", "", True, False, True, True)
    assert gluon == {
        (name, one.bm, one.bn, one.bk, one.stages)
        for operation, name in named.items()
        for one, *_ in gluon_candidates(half._replace(operation=operation), standin.table_of(target))
    }
    kernels = {launch.kernel.removesuffix("_kernel") for launch in launches}
    assert kernels >= {"choose", "dlogits", "dx", "dw", "count", "place", "take_rows", "sum_rows", "tiles"}
    assert kernels >= {"take_pairs", "put_pairs", "zero_rows"}
    assert kernels >= {"put_rows", "return_rows", "put_values", "credit", "wait_metadata", "wait_signals"}
    put = [launch for launch in launches if launch.kernel == "product_kernel" and launch.arguments.get("PUT")]
    awaited = [launch for launch in launches if launch.arguments.get("WAIT_ROWS")]
    assert put and {launch.kernel for launch in awaited} == {"up_kernel", "dhidden_kernel"}


def test_recorded_alignment_follows_storage_offset() -> None:
    x_SM = torch.empty((101, 256), dtype=torch.bfloat16, device="meta")
    source_N = torch.empty(301, dtype=torch.int64, device="meta")
    offsets_E1 = offsets(torch.empty(4, device="meta"))
    with standin.recording(90) as launches:
        gather_rows(x_SM, source_N, offsets_E1)
        gather_rows(x_SM[1:], source_N[1:], offsets_E1)
        gather_rows(x_SM[2:], source_N, offsets_E1)
    first, second = (launch.arguments for launch in launches)  # the third repeats the first
    assert (first["x_ptr"], first["source_ptr"], first["M"]) == ("*bf16:16", "*i64:16", "i32:16")
    assert (second["x_ptr"], second["source_ptr"]) == ("*bf16:16", "*i64")


def test_launches_use_device_of_tensors() -> None:
    """All launches of a layer use the tensors' GPU (here the first) and restore the current GPU afterwards."""
    went: dict[str, int] = {}

    def record_device(fn: Any, **others: Any) -> bool:
        went[fn.name] = standin.current_device()
        return True

    with standin.recording(90), torch.cuda.device(1):
        with patch.object(knobs.runtime, "jit_cache_hook", record_device):
            layers.run(SHAPE, counts=(2,))
        assert standin.current_device() == 1
    assert len(went) > 15 and set(went.values()) == {0}, went


def test_recording_restores_driver_after_error() -> None:
    with pytest.raises(ValueError), standin.recording(90):
        raise ValueError
    assert not torch.empty(0, device="meta").is_cuda
    assert knobs.runtime.jit_cache_hook is None and standin.triton.runtime.driver._active is None
