"""Start LOCAL_SIZE ranks on this host; Open MPI starts one such process per host.

mpirun … -x MASTER_ADDR -x LOCAL_SIZE=8 python -m fusedmoe.tutel.launcher.run -m package.script …
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError


def command(environment: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command for this host's ranks. Raises `ConfigError` without a needed MASTER_ADDR."""
    hosts = read_integer("OMPI_COMM_WORLD_SIZE", 1, 1, given=environment)
    own = read_integer("OMPI_COMM_WORLD_RANK", 0, 0, hosts - 1, given=environment)
    if hosts > 1 and "MASTER_ADDR" not in environment:
        raise ConfigError(f"{hosts} hosts need MASTER_ADDR, the address of the first one")
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nproc_per_node={read_integer('LOCAL_SIZE', 1, 1, given=environment)}",
        f"--nnodes={hosts}",
        f"--node_rank={own}",
        f"--master_addr={environment['MASTER_ADDR'] if hosts > 1 else 'localhost'}",
        f"--master_port={read_integer('MASTER_PORT', 23232, 1, 65535, given=environment)}",
        *("-m", "fusedmoe.tutel.launcher.execl", *arguments),
    ]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("LOCAL_SIZE", "1")
    try:
        started = command(os.environ, sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"fusedmoe.tutel.launcher.run: error: {error}")
    os.execv(started[0], started)
