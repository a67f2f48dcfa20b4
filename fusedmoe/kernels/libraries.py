"""Libraries of device functions that kernels are linked with, found in the packages that bring them.

Nothing here imports Triton or loads a library.
"""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from fusedmoe.errors import ConfigError

#: The NVSHMEM of the default pins. Its package is nvidia-nvshmem-cu12 or -cu13, by CUDA's version. CUDA builds of torch
#: pin their own: 3.4.5 that of torch 2.11, 3.7.2 that of torch 2.15.
NVSHMEM_VERSION = "3.4.5"

# The oldest generation of GPUs that kernels are compiled for.
_OLDEST = 80

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
    """Return the `extern_libs` of a launch whose kernel calls NVSHMEM's device functions.

    NVSHMEM 3.4 has one library for all GPUs. Later ones have one for each generation, and the current GPU takes the
    newest that it can run; without a GPU the kernels are linked with the one that runs on all.

    Raises:
        ConfigError: the package is not there, or has no such library.
    """
    home = nvshmem_home()
    if home is None:
        raise ConfigError(f"NVSHMEM's package is not installed: {HOW_TO_INSTALL}")
    lib = home / "lib"
    path = lib / "libnvshmem_device.bc"
    if not path.exists():
        kinds = {int(one.stem.rpartition("_")[2]): one for one in lib.glob("libnvshmem_device_sm_*.bc")}
        major, minor = _capability()
        suited = [kind for kind in kinds if _OLDEST <= kind <= 10 * major + minor]
        if not suited:
            raise ConfigError(f"there is no {path.name} in {lib}: install NVSHMEM {NVSHMEM_VERSION}")
        path = kinds[max(suited)]
    return {"libnvshmem_device": str(path)}


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else divmod(_OLDEST, 10)
