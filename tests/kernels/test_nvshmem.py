"""Kernels with NVSHMEM's device functions, as far as a machine without it can tell: that they link, and to what."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs

from fusedmoe.errors import ConfigError
from fusedmoe.kernels import libraries
from fusedmoe.kernels.nvshmem import aot_cases, tell_of_modules
from tests.kernels import aot
from tests.kernels.test_aot import HOW, differences

MODULE = "fusedmoe.kernels.nvshmem"


def test_a_case_without_its_library_is_left_out_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "nvshmem_home", lambda: None)
    told = aot.left_out(module=MODULE)
    assert len(told) == len(aot_cases()) == 2
    for case, why in zip(aot_cases(), told, strict=True):
        assert why.startswith(f"{case.name}: NVSHMEM's package is not installed: pip install")
    assert aot.left_out(only="gather_sum") == []
    assert aot.check(module=MODULE) == {}


def test_a_package_of_another_version_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(libraries, "nvshmem_home", lambda: tmp_path)
    with pytest.raises(ConfigError, match="there is no libnvshmem_device.bc in .*: install NVSHMEM 3.4.5"):
        libraries.nvshmem_bitcode()


def test_the_package_is_found_where_modules_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in a second folder of theirs, where the first one has other packages of NVIDIA."""
    lib = tmp_path / "second" / "nvidia" / "nvshmem" / "lib"
    lib.mkdir(parents=True)
    (tmp_path / "first" / "nvidia" / "cudnn").mkdir(parents=True)
    for folder in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert libraries.nvshmem_home() != lib.parent
    (lib / "libnvshmem_host.so.3").touch()
    assert libraries.nvshmem_home() == lib.parent


def test_triton_tells_of_a_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often that was asked for, by one that asks for the same."""
    chain = knobs.HookChain()
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", chain, raising=False)
    told: list[int] = []
    others: list[int] = []
    chain.add(lambda module, function, name, metadata_group, hash: others.append(module))
    for _ in range(3):
        tell_of_modules(told.append)
    chain(77, 1, "some_kernel", {}, "hash")
    assert told == others == [77]


def test_it_links_for_hopper_where_the_package_is_installed() -> None:
    if without := aot.left_out(only="nvshmem put rows"):
        pytest.skip("; ".join(without))
    found = aot.check(only="nvshmem put rows", target=90)
    assert found and not aot.errors(found)
    assert not differences(found), HOW


PTX = """
import triton
from triton.backends.compiler import GPUTarget
from fusedmoe.kernels.nvshmem import aot_cases

for case in aot_cases():
    source = triton.compiler.ASTSource(case.kernel, *case.specialise())
    options = {**case.options, "extern_libs": case.libraries()}
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    print("// end of", case.name)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_link_for_every_target_and_keep_the_order_of_the_protocol(
    nvshmem_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(nvshmem_site))
    found = aot.check(module=MODULE)
    assert len(found) == 6 and not aot.errors(found)
    assert not differences(found), HOW

    path = os.pathsep.join([str(aot.ROOT), str(nvshmem_site)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run([sys.executable, "-c", PTX], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    put, wait, _ = re.split(r"// end of .*\n", done.stdout)
    for text in (put, wait):
        # What registering a module looks for and fills in.
        assert ".visible .const .align 8 .b8 nvshmemi_device_state_d[" in text
    # Rows, then all threads' rows for the whole system, then their signal by one thread.
    body = put[put.index(".entry put_rows_kernel") :]
    fence = body.index("membar.sys")
    assert body.rindex("bar.sync", 0, fence) > body.rindex("st.b8", 0, fence)
    assert "st.volatile.b64" in body[fence : fence + 300]
    # A signal by itself is the first thread's; one whose rank cannot be addressed goes to the network's functions.
    assert len(re.findall(r"call\.uni \w*nvshmemi_transfer_put_signal", body)) == 1
    assert len(re.findall(r"call\.uni \w*nvshmemi_transfer_amo_nonfetch", body)) == 1
    # A wait acquires for the whole system, has an end that is the same for all threads, and then asks NVSHMEM.
    body = wait[wait.index(".entry wait_signals_kernel") :]
    loop = re.search(r"(\$L\w+):.*?bra\.uni\s+\1;", body, re.S)
    assert loop and "ld.global.sys.acquire.b64" in loop[0] and "globaltimer" in loop[0] and "shfl.sync" in loop[0]
    assert "nvshmemi_transfer_syncapi_update_mem" in body[loop.end() :]
