"""Tutel's modules on this library: a script that says `from tutel import moe, net, system` runs unchanged.

    from fusedmoe.tutel import moe as tutel_moe, net, system      # in place of `from tutel import …`
    fusedmoe.tutel.install()                                      # or: `import tutel` means this package
    python -m fusedmoe.tutel script.py …                          # or: the same around a script as it is

A thin facade: routing, order, experts, communication and schedules are the library's own. What is Tutel's are the
names, the layout of parameters and checkpoints, and these semantics, each stated where it is made:

- capacity: k·int(cf·⌈T/E⌉), rounded up as the caller's overlap degree asks (`impls/capacity.py`);
- losses: GShard's by first choices, and load-and-importance with raw logits as thresholds (`impls/losses.py`);
- the router computes in the dtype of its weights, half precision included, unless fp32_gate (`gates/`);
- parameters and their shards: `experts/`.
"""

from __future__ import annotations

from fusedmoe.tutel.aliases import install

__all__ = ["install"]
