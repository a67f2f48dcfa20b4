"""Builds libfusedmoe_nvshmem.so beside fusedmoe/comm/one_sided/nvshmem.py; `make nvshmem` runs it.

    python csrc/nvshmem/build.py --install constraints/cuda.txt     # NVSHMEM's package too, where it is not there
    python csrc/nvshmem/build.py                                    # with what is installed

What is missing is said in words, with the exit code 1. No GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Missing(Exception):
    """Error that says what is missing, and where to get it."""


def tool(*names: str) -> str | None:
    """Finds a program of this Python's environment or of the system."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def cuda_version() -> int:
    """Returns CUDA's major version: that of PyTorch, else that of the toolkit."""
    import torch

    if torch.version.cuda:
        return int(torch.version.cuda.split(".")[0])
    nvcc = tool("nvcc") or tool("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise Missing("the CUDA toolkit, whose headers are needed: there is no nvcc (docs.nvidia.com/cuda has it)")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.", said)
    if found is None:
        raise Missing(f"the version of CUDA: {nvcc} --version does not say it")
    return int(found[1])


def package(install: Path | None) -> Path:
    """Returns the folder of NVSHMEM's package for this CUDA; installs it first, where constraints are given."""
    from fusedmoe.kernels.libraries import HOW_TO_INSTALL, nvshmem_home, nvshmem_packages

    cuda = cuda_version()
    name = f"nvidia-nvshmem-cu{cuda}"
    if install is not None and cuda not in nvshmem_packages():
        print(f"Installing {name}: 60 MB.", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(install)]
        if subprocess.run([*pip, name]).returncode:
            raise Missing(f"{name}: pip did not install it, and says above why")
        importlib.invalidate_caches()
    home, have = nvshmem_home(), nvshmem_packages()
    if home is None:
        raise Missing(f"NVSHMEM's package: {HOW_TO_INSTALL}")
    if have and cuda not in have:
        raise Missing(f"{name}: this is CUDA {cuda}, and only that for CUDA {', '.join(map(str, have))} is installed")
    return home


def build(home: Path, into: Path) -> None:
    """Configures, compiles and installs; what the tools say is shown where one of them fails."""
    cmake = tool("cmake")
    if cmake is None:
        raise Missing("cmake 3.21 or newer (apt-get install cmake, or pip install cmake)")
    if tool(os.environ.get("CXX", "c++"), "g++", "clang++") is None:
        raise Missing("a C++ compiler (apt-get install g++)")
    work = ROOT / "build" / "nvshmem"
    # What an earlier run has found may be somewhere else now.
    (work / "CMakeCache.txt").unlink(missing_ok=True)
    steps = (
        [cmake, "-S", ROOT, "-B", work, f"-DNVSHMEM_HOME={home}", f"-DFUSEDMOE_LIBRARY_DIR={into}"],
        [cmake, "--build", work],
        [cmake, "--install", work],
    )
    for step in steps:
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            raise Missing("something for cmake, which says above what")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", type=Path, metavar="CONSTRAINTS", help="install NVSHMEM's package with these pins")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="for the library (default: beside its module)")
    arguments = parser.parse_args()
    try:
        from fusedmoe.comm.one_sided.nvshmem import LIBRARY, unavailable_reason

        into = arguments.into or LIBRARY.parent
        build(package(arguments.install), into.resolve())
    except Missing as missing:
        print(f"NVSHMEM transport: missing: {missing}", file=sys.stderr)
        return 1
    print(f"Built {into / LIBRARY.name}.")
    if arguments.into is None:
        reason = unavailable_reason()
        print(f"It cannot be used here: {reason}." if reason else "It can be used here.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
