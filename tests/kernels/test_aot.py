from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels import aot


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("module", [module.__name__ for module in aot.modules()])
def test_every_kernel_compiles(module: str, target: int) -> None:
    found = aot.check(module=module, target=target)
    assert found and not aot.errors(found)


def test_a_selection_compiles_for_every_target() -> None:
    found = aot.check(quick=True)
    assert found and not aot.errors(found)
