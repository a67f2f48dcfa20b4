"""Instructions without which a kernel is right, and much slower than its GPU."""

from __future__ import annotations

from bench.aot.standin import Launch

# Tensor cores of each generation.
_PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
_GROUPED = ("up_kernel", "dhidden_kernel", "product_kernel", "dweight_kernel", "specialised_kernel")
_OF_THE_GATE = ("logits_kernel", "dx_kernel", "dw_kernel", "choose_kernel")


def expected(launch: Launch) -> tuple[str, ...]:
    """Of tensor cores, of copies that pass the registers by, and of warps that hand registers to one another."""
    told = launch.told
    words = []
    if launch.kernel in _GROUPED and "*fp32" not in str(told.get("out_ptr") or told.get("a_ptr")):
        words.append(_PRODUCTS[launch.target])
    if launch.kernel in _OF_THE_GATE and told.get("PRODUCT", True) and launch.target == 90:
        words.append("HGMMA")
    if told.get("DESCRIPTORS") or launch.kernel == "specialised_kernel":
        words.append("UTMALDG")
    bulk_alone = launch.kernel == "product_kernel" and told["DESCRIPTORS"]
    if launch.kernel in _GROUPED[:4] and told.get("EVEN_K", True) and not bulk_alone:
        words.append("LDGSTS")
    if launch.kernel == "specialised_kernel":
        words.append("USETMAXREG")
    return tuple(words)
