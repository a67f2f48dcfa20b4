"""The C library, built without a GPU: exports and errors, and jobs over a fake NVSHMEM (fake_host.cpp)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusedmoe.comm.one_sided.nvshmem import FUNCTIONS, PREFIX, unavailable_reason

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start_python(site: Path, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


@pytest.fixture(scope="module")
def library(nvshmem_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} to build with")
    into = tmp_path_factory.mktemp("library")
    code, out = output_of(start_python(nvshmem_site, "csrc/nvshmem/build.py", "--into", into))
    if "there is no nvcc" in out:
        pytest.skip("there is no CUDA toolkit, whose headers are needed")
    assert code == 0, out
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build libcuda.so.1 and libnvshmem_host.so.3 for a machine without a GPU."""
    folder = tmp_path_factory.mktemp("stand-ins")
    symbols = folder / "symbols"
    symbols.write_text("NVSHMEM { global: *; };\n")
    for source, name in (("fake_driver.cpp", "libcuda.so.1"), ("fake_host.cpp", "libnvshmem_host.so.3")):
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={symbols}"]
        subprocess.run(["c++", *flags, HERE / source, "-o", folder / name], check=True)
    return folder


def test_library_exports_exactly_functions_of_binding(library: Path) -> None:
    said = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {name for kind, name in re.findall(r" ([A-Z]) (\w+)", said) if kind == "T"}
    assert exported == {PREFIX + name for name in FUNCTIONS}


NO_GPU = """
import ctypes
from pathlib import Path
from fusedmoe.comm.one_sided import nvshmem

nvshmem.LIBRARY = Path({library!r})
nvshmem.no_gpu_reason = lambda: ""  # the binding would not even load it
print(nvshmem.unavailable_reason())
library = nvshmem.load()
print(library.versions()[0], library.state())
word, place = ctypes.c_int(), ctypes.c_void_p()
room = ctypes.create_string_buffer(128)
calls = dict(
    unique_id=(room, 128), init=(room, 128, 0, 1), adopt=(), finalize=(), allocate=(8, place), free=(8,),
    peer_pointer=(8, 0, place), put_signal=(8, 8, 8, 8, 1, 0, None), wait=(8, 1, None), barrier=(None,),
    register_module=(8,),
)
assert calls.keys() | {{"probe", "version", "state", "modules", "last_error"}} == nvshmem.FUNCTIONS.keys()
for name, arguments in calls.items():
    try:
        library.call(name, *arguments)
        print(name, "worked")
    except nvshmem._LibraryError as error:
        print(name, "said", error)
print("alive")
"""


@pytest.mark.skipif(not unavailable_reason(), reason="NVSHMEM works here")
def test_every_function_returns_error_without_gpu(library: Path, nvshmem_site: Path) -> None:
    """No function ends the process, unlike NVSHMEM itself."""
    code, out = output_of(start_python(nvshmem_site, "-c", NO_GPU.format(library=str(library))))
    assert code == 0 and out.splitlines()[-1] == "alive", out
    first, second, *calls, _ = out.splitlines()
    assert "driver" in first or "GPU" in first
    assert second.startswith("(3, 4, 5) _ProcessState(owner=0, pe=-1, pes=0")
    assert len(calls) == 11
    for line in calls:
        assert re.fullmatch(r"\w+ said .*(driver|GPU|NVSHMEM is not open).*", line), line


@pytest.mark.parametrize(
    ("scenario", "variables"),
    [
        ("shared", {}),
        ("shared", {"FAKE_OTHER_NODE": "1"}),
        ("adopted", {}),
        ("heap", {}),
        ("heap", {"FAKE_OTHER_NODE": "1"}),
        ("no_room", {}),
        ("init_fails", {"FAKE_INIT_FAILS": "1"}),
        ("module_refused", {}),
        ("one_without", {}),
    ],
)
def test_two_rank_scenarios_over_fake_nvshmem(
    scenario: str, variables: dict[str, str], library: Path, stand_ins: Path, nvshmem_site: Path, tmp_path: Path
) -> None:
    module = ("-m", "tests.comm.nvshmem.ranks", scenario)
    variables = {**variables, "FAKE_NVSHMEM": str(tmp_path)}
    ranks = [start_python(nvshmem_site, *module, rank, stand_ins, library, **variables) for rank in range(2)]
    try:
        for rank in ranks:
            code, out = output_of(rank)
            assert code == 0 and out.splitlines()[-1] == "passed", out
    finally:
        for rank in ranks:
            rank.kill()


def test_thread_without_cuda_context_is_reported(
    library: Path, stand_ins: Path, nvshmem_site: Path, tmp_path: Path
) -> None:
    lines = (
        "from pathlib import Path",
        "from fusedmoe.comm.one_sided import nvshmem",
        "from tests.comm.nvshmem.ranks import stand_in",
        f"stand_in(Path({str(stand_ins)!r}), Path({str(library)!r}))",
        "assert nvshmem.unavailable_reason() == '', nvshmem.unavailable_reason()",
        "job = nvshmem.load().unique_id()",
        "nvshmem.load().call('init', job, 128, 0, 1)",
    )
    variables = {"FAKE_NVSHMEM": str(tmp_path), "FAKE_NO_CONTEXT": "1"}
    code, out = output_of(start_python(nvshmem_site, "-c", "\n".join(lines), **variables))
    assert code == 1 and out.splitlines()[-1].endswith("this thread has no CUDA context: choose its GPU first"), out


@pytest.mark.parametrize(
    ("missing", "says"),
    [("cmake", "missing: cmake 3.21 or newer"), ("package", "missing: NVSHMEM's package: pip install")],
)
def test_build_names_missing_requirement(missing: str, says: str, nvshmem_site: Path, tmp_path: Path) -> None:
    # All tools but one present; a package that cannot be found.
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("c++", "nvcc"):
        if found := shutil.which(name):
            (path / name).symlink_to(found)
    lines = [
        "import runpy, sys",
        f"sys.argv = ['build.py', '--into', {str(tmp_path)!r}]",
        "import fusedmoe.kernels.libraries as libraries",
        "libraries.nvshmem_home = lambda: None" if missing == "package" else "",
        "runpy.run_path('csrc/nvshmem/build.py', run_name='__main__')",
    ]
    if shutil.which("nvcc") is None:
        pytest.skip("there is no CUDA toolkit")
    code, out = output_of(start_python(nvshmem_site, "-c", "\n".join(lines), PATH=str(path)))
    assert code == 1 and says in out, out
