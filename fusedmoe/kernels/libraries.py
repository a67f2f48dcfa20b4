"""Libraries of device functions that kernels are linked with, found in the packages that bring them.

Nothing here imports Triton or loads a library.
"""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from fusedmoe.errors import ConfigError

#: The NVSHMEM that is built and tested with. Its package is nvidia-nvshmem-cu12 or -cu13, by CUDA's version.
NVSHMEM_VERSION = "3.4.5"

HOW_TO_INSTALL = "pip install 'fusedmoe[nvshmem]' for CUDA 13, 'fusedmoe[nvshmem-cu12]' for CUDA 12"


def nvshmem_home() -> Path | None:
    """The folder of NVSHMEM's package, which has include/ and lib/; None where it is not installed."""
    spec = PathFinder.find_spec("nvidia")  # imports nothing
    folders = [Path(folder) / "nvshmem" for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((folder for folder in folders if (folder / "lib" / "libnvshmem_host.so.3").exists()), None)


def nvshmem_packages() -> dict[int, str]:
    """CUDA's major version -> the version of NVSHMEM's package for it; {} where none is installed."""
    found = {}
    for cuda in (12, 13):
        try:
            found[cuda] = metadata.version(f"nvidia-nvshmem-cu{cuda}")
        except metadata.PackageNotFoundError:
            continue
    return found


def nvshmem_bitcode() -> dict[str, str]:
    """The `extern_libs` of a launch whose kernel calls NVSHMEM's device functions.

    Raises:
        ConfigError: the package is not there, or of a version that has no such library for all GPUs.
    """
    home = nvshmem_home()
    if home is None:
        raise ConfigError(f"NVSHMEM's package is not installed: {HOW_TO_INSTALL}")
    path = home / "lib" / "libnvshmem_device.bc"
    if not path.exists():
        raise ConfigError(f"there is no {path.name} in {path.parent}: install NVSHMEM {NVSHMEM_VERSION}")
    return {"libnvshmem_device": str(path)}
