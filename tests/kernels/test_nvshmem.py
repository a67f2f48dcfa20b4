"""Kernels with NVSHMEM's device functions, tested without NVSHMEM hardware: that they link, and to which functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton import knobs

from fusedmoe.errors import ConfigError
from fusedmoe.kernels import libraries
from fusedmoe.kernels.triton.one_sided.network import register_loaded_modules
from tests.kernels import aot
from tests.kernels.test_aot import HOW, differences

ONE_SIDED, PRODUCTS = "tests.kernels.cases.one_sided", "tests.kernels.cases.grouped"
ONE = "put rows bfloat16 128x4096 nvshmem"


def test_case_without_library_is_skipped_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "nvshmem_home", lambda: None)
    told = aot.left_out(module=ONE_SIDED)
    linked = [case.name for module, case in aot.cases() if module == ONE_SIDED and case.name.endswith("nvshmem")]
    assert len(told) == len(linked) > 10
    for name, why in zip(linked, told, strict=True):
        assert why.startswith(f"{name}: NVSHMEM's package is not installed: pip install")
    assert aot.left_out(only="gather_sum") == []
    assert aot.check(ONE) == {}


def test_communicating_kernels_have_near_and_far_cases() -> None:
    """Each case for remote peers has a counterpart for near peers, with another constexpr and no library."""
    cases = {case.name: case for _, case in aot.cases()}
    linked = {name: case for name, case in cases.items() if name.endswith("nvshmem")}
    kernels = {case.kernel.__name__ for case in linked.values()}
    moving = ["put_rows", "return_rows", "put_values", "wait_metadata", "wait_signals", "signal_far"]
    assert kernels == {f"{name}_kernel" for name in (*moving, "credit", "send_faults", "up", "dhidden", "product")}
    for name, case in linked.items():
        assert case.libraries is libraries.nvshmem_bitcode and not case.quick
        plain = name.removesuffix(" nvshmem")
        near = cases.get(plain) or cases.get(plain.replace(" r255 in flight", " in flight"))
        if name != "signal far nvshmem":
            assert near is not None and near.kernel is case.kernel and near.libraries is dict, name
            assert (near.arguments["NVSHMEM"], case.arguments["NVSHMEM"]) == (False, True)


def test_missing_nvshmem_bitcode_names_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(libraries, "nvshmem_home", lambda: tmp_path)
    with pytest.raises(ConfigError, match="libnvshmem_device.bc not found in .*: install NVSHMEM 3.4.5"):
        libraries.nvshmem_bitcode()


@pytest.mark.parametrize(
    ("capability", "chosen"), [(None, 80), ((8, 0), 80), ((8, 6), 80), ((8, 9), 89), ((9, 0), 90), ((12, 0), 90)]
)
def test_bitcode_follows_compute_capability(
    capability: tuple[int, int] | None, chosen: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names match NVSHMEM 3.7."""
    (tmp_path / "lib").mkdir()
    for kind in (75, 80, 89, 90):
        (tmp_path / "lib" / f"libnvshmem_device_sm_{kind}.bc").touch()
    monkeypatch.setattr(libraries, "nvshmem_home", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert libraries.nvshmem_bitcode() == {
        "libnvshmem_device": str(tmp_path / "lib" / f"libnvshmem_device_sm_{chosen}.bc")
    }


def test_nvshmem_package_is_found_in_namespace_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second folder of the namespace package is searched if the first contains only other NVIDIA packages."""
    lib = tmp_path / "second" / "nvidia" / "nvshmem" / "lib"
    lib.mkdir(parents=True)
    (tmp_path / "first" / "nvidia" / "cudnn").mkdir(parents=True)
    for folder in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert libraries.nvshmem_home() != lib.parent
    (lib / "libnvshmem_host.so.3").touch()
    assert libraries.nvshmem_home() == lib.parent


def test_module_load_hook_runs_once_per_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is reported once, even if the same hook is registered several times."""
    chain = knobs.HookChain()
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", chain, raising=False)
    told: list[int] = []
    others: list[int] = []
    chain.add(lambda module, function, name, metadata_group, hash: others.append(module))
    for _ in range(3):
        register_loaded_modules(told.append)
    chain(77, 1, "some_kernel", {}, "hash")
    assert told == others == [77]


def test_put_kernel_links_for_hopper() -> None:
    if without := aot.left_out(only=ONE):
        pytest.skip("; ".join(without))
    found = aot.check(only=ONE, target=90)
    errors = aot.errors(found)
    if aot.recorded()[0] != triton.__version__:
        # Other versions of Triton and NVSHMEM may need more registers than the launch permits, which only costs time.
        errors = [error for error in errors if "spills" not in error]
    assert found and not errors
    assert not differences(found), HOW


PTX = """
import sys
from importlib import import_module

import triton
from triton.backends.compiler import GPUTarget

module, name = sys.argv[1:]
case = next(case for case in import_module(module).aot_cases() if case.name == name)
source = triton.compiler.ASTSource(case.kernel, *case.specialise())
options = {**case.options, "extern_libs": case.libraries()}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def body(site: Path, module: str, name: str) -> str:
    """Extract a kernel's own code, without the functions that it calls."""
    path = os.pathsep.join([str(aot.ROOT), str(site)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-c", PTX, module, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    # The symbol that module registration looks up and fills in.
    assert ".visible .const .align 8 .b8 nvshmemi_device_state_d[" in done.stdout
    return re.split(r"^\.func", done.stdout[done.stdout.index(".visible .entry") :], flags=re.M)[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_put_follows_barrier_after_row_stores(nvshmem_site: Path) -> None:
    code = body(nvshmem_site, ONE_SIDED, ONE)
    call = code.index("nvshmemi_transfer_put_signal")
    stored = code.rindex("st.global", 0, call)
    assert "bar.sync" in code[stored:call]
    # A near peer needs one release for the whole system; for a remote peer NVSHMEM sets the signal, once.
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", code)) == 1
    assert len(re.findall(r"call\.uni \w*nvshmemi_transfer_put_signal", code)) == 1
    assert len(re.findall(r"call\.uni \w*nvshmemi_transfer_amo_nonfetch", code)) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_signal_follows_fence_and_credit_has_none(nvshmem_site: Path) -> None:
    fence, sets = "nvshmemi_transfer_fence", "nvshmemi_transfer_amo_nonfetch"
    code = body(nvshmem_site, ONE_SIDED, "signal far nvshmem")
    assert 0 < code.index(fence) < code.index(sets)
    for buffers in (1, 2, 3):
        code = body(nvshmem_site, ONE_SIDED, f"credit {buffers} nvshmem")
        assert len(re.findall(rf"call\.uni \w*{sets}", code)) == buffers and fence not in code, buffers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nvshmem_update_follows_acquire_wait(nvshmem_site: Path) -> None:
    up = "up bfloat16 ieee swiglu gather extra even bulk 128x128x64 w8 s3 g8 in flight nvshmem"
    for module, name in ((ONE_SIDED, "wait 256 nvshmem"), (PRODUCTS, up)):
        code = body(nvshmem_site, module, name)
        asked = code.index("nvshmemi_transfer_syncapi_update_mem")
        assert code.rindex("acquire", 0, asked) > 0 and "acquire" not in code[asked:], name
    assert "wgmma" not in code[:asked] and "wgmma" in code[asked:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_last_program_of_row_tile_puts(nvshmem_site: Path) -> None:
    down = "down bfloat16 ieee extra even bulk 128x128x64 w8 s3 g8 r255 in flight nvshmem"
    code = body(nvshmem_site, PRODUCTS, down)
    call = code.index("nvshmemi_transfer_rma_nbi")
    counted = code.rindex("atom.global.gpu.acq_rel.add", 0, call)
    assert code.rindex("st.global", 0, counted) < counted and "st.global" not in code[counted:call]
