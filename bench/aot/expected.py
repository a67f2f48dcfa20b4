"""Instructions that a kernel needs in order to be fast; without them it is correct but much slower."""

from __future__ import annotations

from bench.aot.standin import Launch

# Tensor-core instruction of each generation.
_PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
_GROUPED = ("up_kernel", "dhidden_kernel", "product_kernel", "dweight_kernel")
_OF_THE_GATE = ("logits_kernel", "dx_kernel", "dw_kernel", "choose_kernel")


def expected(launch: Launch) -> tuple[str, ...]:
    """Return the expected instructions: tensor cores, and copies that bypass registers."""
    told = launch.told
    if ".gluon." in launch.module:
        return ("HGMMA", "UTMALDG", *(["LDGSTS"] if "source_ptr" in told else []))
    words = []
    if launch.kernel in _GROUPED and "*fp32" not in str(told.get("out_ptr") or told.get("a_ptr")):
        words.append(_PRODUCTS[launch.target])
    if launch.kernel in _OF_THE_GATE and told.get("PRODUCT", True) and launch.target == 90:
        words.append("HGMMA")
    if told.get("DESCRIPTORS"):
        words.append("UTMALDG")
    looked_up = told.get("GATHER_LEFT") or told.get("GATHER_RIGHT")
    bulk_alone = told.get("DESCRIPTORS") and not looked_up and launch.kernel in ("product_kernel", "dweight_kernel")
    if launch.kernel in _GROUPED and told.get("EVEN_K", True) and not bulk_alone:
        words.append("LDGSTS")
    if sends_aligned_rows(launch):
        words.append("STG.E.128")
    return tuple(words)


def unwanted(launch: Launch) -> tuple[str, ...]:
    """Return the instructions that the kernel must not contain: stores of rows that are narrower than 16 bytes."""
    return ("STG.E.U8", "STG.E.U16") if sends_aligned_rows(launch) else ()


def sends_aligned_rows(launch: Launch) -> bool:
    """Return whether the kernel stores rows to other ranks whose size is a multiple of 16 bytes."""
    if launch.kernel == "put_rows_kernel":
        widths = ["M", *(["second_M"] if launch.told["SECOND_TILE"] else [])]
        return any(":16" in str(launch.told[name]) for name in widths)
    return bool(launch.told.get("ALIGNED"))
