from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels import aot


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_kernel_compiles_for_every_target() -> None:
    found = aot.check()
    assert found and not aot.errors(found)


def test_a_selection_compiles_for_every_target() -> None:
    found = aot.check(quick=True)
    assert found and not aot.errors(found)
