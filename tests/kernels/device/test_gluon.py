"""Each configuration of the Gluon form on a Hopper GPU, in a separate process, compared with its definition."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.apart import Case, check_apart
from bench.gpu.correctness import check
from bench.gpu.gluon_first import variants
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.triton.grouped.autotune import NUM_OCCUPIED
from fusedmoe.kernels.triton.grouped.configs import Variant, gluon_candidates, with_programs

_HOPPER = not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", list(variants()), ids=str)
def test_gluon_configurations_pass_check(variant: Variant, dtype: str) -> None:
    variant = variant._replace(dtype=dtype)
    cases = [Case(variant, one.config) for one in gluon_candidates(variant, (9, 0))]
    verdicts = dict(check_apart(cases, torch.device("cuda")))
    assert set(verdicts.values()) == {""}, verdicts


@pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("variant", list(variants()), ids=str)
def test_gluon_configurations_pass_check_with_fewer_programs(variant: Variant) -> None:
    """As during communication, with more tiles than programs."""
    device = torch.device("cuda", torch.cuda.current_device())
    free = torch.cuda.get_device_properties(device).multi_processor_count - NUM_OCCUPIED
    for one in gluon_candidates(variant, (9, 0)):
        for programs in (1, 7, free):
            assert check(variant, with_programs(one.config, programs), device, (900, 1, 0, 1300), (576, 784)) == ""
