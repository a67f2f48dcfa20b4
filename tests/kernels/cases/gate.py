"""The gate's kernels: choices and their gradient, and the router's products."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton

from bench.aot.standin import TARGETS, table_of
from fusedmoe.kernels.gate import MAX_TOP_K, SCORES, GateRule
from fusedmoe.kernels.triton.gate import router
from fusedmoe.kernels.triton.gate.choose import (
    choose_kernel,
    dlogits_kernel,
    fused_tile,
    launch_options,
    rowwise_tile,
)
from fusedmoe.kernels.triton.gate.router import Tile, operand_to_split, product_tile
from tests.kernels.cases import AotCase


def aot_cases() -> list[AotCase]:
    return [*_of_choices(), *_of_products()]


def _of_choices() -> list[AotCase]:
    """Tiles with the costliest rules and every dtype; every combination of a rule's parts, and every K, in one tile.

    Expert counts that are no multiple of 16 take up to twice the registers, so every tile width also has such a case.
    """
    half, single = torch.bfloat16, torch.float32
    full: dict[str, Any] = {"statistics": True, "logsumexp": True}
    rules = [
        (GateRule(8, **full), False),
        (GateRule(16, **full), False),
        (GateRule(1, normalize=False, **full), False),
        (GateRule(3, normalize=False, **full), True),
        (GateRule(16, "sigmoid", **full), True),
        (GateRule(10, "none", **full), False),
        (GateRule(2, "sigmoid", normalize=False), False),
    ]
    # Rule, whether there is a bias, experts, dtypes of the product (None if logits are passed).
    choices: dict[tuple[GateRule, bool, int, tuple[torch.dtype, torch.dtype] | None], None]
    choices = dict.fromkeys(
        (rule, bias, experts, dtypes)
        for experts in (1, 7, 24, 60, 64, 100, 128, 200, 256, 500, 512)
        for rule, bias in rules
        for dtypes in (None, (half, half), (half, single), (single, single))
        if rule.k <= experts
    )
    for x, w in ((torch.float16, torch.float16), (torch.float16, single)):
        choices |= dict.fromkeys((rules[0][0], False, experts, (x, w)) for experts in (24, 64, 128, 256))
    flags = (False, True)
    every_rule = [
        (GateRule(8, score, normalize, statistics=statistics, logsumexp=logsumexp), bias)
        for score, normalize, statistics, logsumexp, bias in product(SCORES, flags, flags, flags, flags)
    ]
    every_rule += [(GateRule(k, **full), False) for k in range(1, MAX_TOP_K + 1)]
    choices |= dict.fromkeys((rule, bias, 128, None) for rule, bias in every_rule)

    def is_rare(rule: GateRule, experts: int) -> bool:
        return experts not in (60, 128, 500) or rule not in (rules[0][0], rules[3][0], rules[4][0])

    cases = [case for choice in choices for case in _choose_cases(*choice, rare=is_rare(choice[0], choice[2]))]
    gradients = dict.fromkeys((rule, experts, True, False) for rule, _, experts, _ in choices)
    gradients |= dict.fromkeys((rule, 128, False, False) for rule, _ in rules if rule.statistics)
    gradients |= dict.fromkeys((rules[0][0], experts, True, True) for experts in (60, 128, 500))
    return cases + [_dlogits_case(*gradient, rare=is_rare(*gradient[:2])) for gradient in gradients]


def _padded(experts: int) -> int:
    """Columns of dlogits as two summands."""
    return triton.cdiv(experts, 16) * 16


def _title(rule: GateRule, bias: bool) -> str:
    flags = {"normalize": rule.normalize, "bias": bias, "statistics": rule.statistics, "logsumexp": rule.logsumexp}
    return " ".join([f"{rule.score} K={rule.k}", *(name for name, flag in flags.items() if flag)])


def _choose_cases(
    rule: GateRule, bias: bool, experts: int, dtypes: tuple[torch.dtype, torch.dtype] | None, rare: bool
) -> list[AotCase]:
    x, w = dtypes or (None, None)
    M = 0 if dtypes is None else 100 if experts == 7 else 4096
    title = f"gate{' choose' * (x is None)} {_title(rule, bias)} E={experts}"
    if x is not None:
        title += f" {str(x)[6:]} {str(w)[6:]}"
    apart = "" if x is None or w is None else operand_to_split(x, w)
    targets: dict[Tile, list[int]] = {}
    for target in TARGETS:
        at = table_of(target)
        tile = rowwise_tile(experts, at) if dtypes is None else fused_tile(experts, apart, at)
        if tile is not None:
            targets.setdefault(tile, []).append(target)
    single, cases = torch.float32, []
    for tile, found in targets.items():
        arguments = {
            "x_ptr": x,
            "w_ptr": w,
            "logits_ptr": single,
            "bias_ptr": single if bias else None,
            "expert_ptr": torch.int64,
            "weight_ptr": single,
            "sums_ptr": single if rule.statistics else None,
            "logsumexp_ptr": single if rule.logsumexp else None,
            "bad_ptr": torch.int64,
            "length": "i32",
            "blocks": "i32",
            "programs": "i32",
            "tiles": "i32",
            "M": M,
            "E": experts,
            "scale": 1.0,
            "BIAS": bias,
            "STATISTICS": rule.statistics,
            "PRODUCT": dtypes is not None,
            "EVEN": M % tile.depth == 0,
            "SPLIT": apart,
            "INTERPRET": False,
            "BK": tile.depth,
            **launch_options(rule, tile),
        }
        options = {"num_stages": tile.stages} | {name: arguments.pop(name) for name in ("num_warps", "maxnreg")}
        expect = {90: ("HGMMA",)} if dtypes is not None and 90 in found else {}
        quick = not rare and (rule.k, experts, dtypes) == (8, 128, (torch.bfloat16,) * 2)
        name = f"{title} {tile}"
        cases.append(AotCase(name, choose_kernel, arguments, options, tuple(found), expect, quick, rare))
    return cases


def _dlogits_case(rule: GateRule, experts: int, weights: bool, apart: bool, rare: bool) -> AotCase:
    single, (tile,) = torch.float32, {rowwise_tile(experts, table_of(at)) for at in TARGETS}
    arguments: dict[str, Any] = {
        "logits_ptr": single,
        "expert_ptr": torch.int64,
        "dweight_ptr": single if weights else None,
        "dscore_ptr": single if rule.statistics else None,
        "dlogsumexp_ptr": single if rule.logsumexp else None,
        "dlogits_ptr": torch.bfloat16 if apart else single,
        "length": "i32",
        "blocks": "i32",
        "E": experts,
        "scale": 1.0,
        "stride": _padded(experts) if apart else experts,
        "plane": 4096 * (_padded(experts) if apart else experts),
        "APART": apart,
        "WEIGHTS": weights,
        "STATISTICS": rule.statistics,
        **launch_options(rule, tile),
    }
    options = {name: arguments.pop(name) for name in ("num_warps", "maxnreg")}
    quick = not rare and weights and (rule.k, experts) == (8, 128)
    name = f"gate dlogits {_title(rule, False)}{' weights' * weights}{' apart' * apart} E={experts} {tile}"
    return AotCase(name, dlogits_kernel, arguments, options, quick=quick, rare=rare)


_KERNELS = {"logits": router.logits_kernel, "dx": router.dx_kernel, "dw": router.dw_kernel}


def _summands_case(experts: int) -> AotCase:
    arguments: dict[str, Any] = {"d_ptr": torch.float32, "out_ptr": torch.bfloat16, "count": "i32", "E": experts}
    stride = _padded(experts)
    arguments |= {"stride": stride, "plane": 4096 * stride, "PADDED": stride > experts, "BLOCK": 2048}
    return AotCase(f"gate summands E={experts}", router.summands_kernel, arguments, {"num_warps": 4})


def _sum_case(rows: int, columns: int, dtype: torch.dtype) -> AotCase:
    arguments: dict[str, Any] = {"parts_ptr": torch.float32, "first_ptr": dtype, "second_ptr": dtype, "rows": "i32"}
    arguments |= {"columns": columns, "half": "i32", **router.block_of_parts(rows)}
    name = f"gate sum {str(dtype)[6:]} rows={rows} columns={columns}"
    return AotCase(name, router.sum_kernel, arguments, {"num_warps": 8})


def _of_products() -> list[AotCase]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    pairs = ((bf16, bf16), (bf16, fp32), (fp16, fp16), (fp16, fp32), (fp32, fp32))
    sizes = ((100, 7), (4096, 512), (100, 512), (4096, 7), (4112, 1))
    # By token count: small, large, and intermediate.
    kinds = [(op, x, w, M, E, 32768) for op in _KERNELS for x, w in pairs for M, E in sizes]
    kinds += [("logits", bf16, bf16, 4096, E, S) for E in (128, 512) for S in (4096, 262144)]
    kinds += [("logits", bf16, bf16, 4096, 128, 32768)]
    kinds += [(op, bf16, bf16, M, E, 32768) for op in ("dx", "dw") for M, E in ((4096, 128), (4096, 24), (4096, 64))]
    helpers = [*map(_summands_case, (7, 128)), *(_sum_case(rows, 24 * 4096, bf16) for rows in (2, 4, 33, 264))]
    helpers += [_sum_case(rows, columns, fp32) for rows in (1, 2048) for columns in (7, 128)]
    return [*helpers, *(case for kind in kinds for case in _product_cases(*kind))]


def _product_cases(operation: str, x: torch.dtype, w: torch.dtype, M: int, E: int, S: int) -> list[AotCase]:
    single = torch.float32
    apart = operand_to_split(*{"logits": (x, w), "dx": (single, w), "dw": (single, x)}[operation])
    summed = apart == "a" and operation != "logits"
    dlogits, kind, apart = (torch.bfloat16, "summed", "") if summed else (single, apart, apart)
    targets: dict[tuple[Tile, bool], list[int]] = {}
    cases, stride = [], _padded(E) if summed else E
    rows = {"stride": stride, "plane": 4096 * stride}
    for target in TARGETS:
        tile = product_tile(operation, kind, table_of(target), S, E, M % 128 == 0)
        whole = operation == "dx" and router.is_whole(1 + summed, stride, M, tile, table_of(target))
        targets.setdefault((tile, whole), []).append(target)
    for (tile, whole), at in targets.items():
        arguments: dict[str, Any] = {"S": "i32", "M": M, "E": E}
        if operation == "logits":
            launch = router.launch_options(apart, tile, "BS", "BE")
            arguments |= {"x_ptr": x, "w_ptr": w, "logits_ptr": single, "EVEN": M % tile.depth == 0}
        elif operation == "dx":
            launch = router.launch_options(apart, tile, "BS", "BM")
            arguments |= {"dlogits_ptr": dlogits, "w_ptr": w, "dx_ptr": x, **rows, "SUMMANDS": 1 + summed}
            arguments |= {"groups": "i32", "WHOLE": whole}
            arguments["EVEN"] = E % tile.depth == 0 and M % tile.columns == 0
        else:
            launch = router.launch_options(apart, tile, "BE", "BM")
            arguments |= {"dlogits_ptr": dlogits, "x_ptr": x, "dw_ptr": single, "part_rows": "i32"}
            even = E % tile.rows == 0 and M % tile.columns == 0
            arguments |= {**rows, "SUMMANDS": 1 + summed, "EVEN": even}
        options = {option: launch.pop(option) for option in ("num_warps", "num_stages")}
        arguments |= {**launch, "INTERPRET": False}
        name = f"gate {operation} {str(x)[6:]} {str(w)[6:]} M={M} E={E} S={S} {tile}{' whole' * whole}"
        expect = {90: ("HGMMA",)} if 90 in at else {}
        quick = (x, w, M, E) == (torch.bfloat16, single, 4096, 512)
        rare = (M, E) not in ((100, 7), (4096, 512), (4096, 24), (4096, 128)) or x == torch.float16
        cases.append(AotCase(name, _KERNELS[operation], arguments, options, tuple(at), expect, quick, rare))
    return cases
