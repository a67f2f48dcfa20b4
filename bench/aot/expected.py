"""Instructions without which a kernel is right, and much slower than its GPU."""

from __future__ import annotations

from bench.aot.standin import Launch

# Tensor cores of each generation.
_PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
_GROUPED = ("up_kernel", "dhidden_kernel", "product_kernel", "dweight_kernel")
_OF_THE_GATE = ("logits_kernel", "dx_kernel", "dw_kernel", "choose_kernel")


def expected(launch: Launch) -> tuple[str, ...]:
    """Returns the instructions that are expected: of tensor cores, and of copies that pass the registers by."""
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
    return tuple(words)
