from fusedmoe.kernels.backend import INTERPRET

if INTERPRET:
    from tests.kernels.language import patch_once

    patch_once()
