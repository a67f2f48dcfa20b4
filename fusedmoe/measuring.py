"""Measuring: what this machine and the parts of a model's steps take, kept on disk, and recorders of timelines.

`cached_profile` measures collectives and matrix products once for a machine, a layout and a dtype. `observe_steps` runs
whole steps by several plans and returns what their parts took. A `Recorder` turns what runs into a `Timeline`.
`runnable_kinds` and `require_runnable` say which tasks a layer, or a step, can run.
"""

from __future__ import annotations

from fusedmoe.layers.measure import measured_costs, undisturbed
from fusedmoe.layers.schedule import require_same_plans
from fusedmoe.runtime.cache import cached_observed, cached_plans, cached_profile, kept_observed, machine_facts
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.runtime.profiler import BUDGET_S as PROFILE_BUDGET_S
from fusedmoe.runtime.profiler import STEPS_BUDGET_S as STEPS_BUDGET_S
from fusedmoe.runtime.profiler import Profile, observe_steps
from fusedmoe.runtime.progress import WorkBar, make_display
from fusedmoe.runtime.recorder import Recorder, active_recorder, in_layer, record_with, recorded, span

__all__ = ["PROFILE_BUDGET_S", "Profile", "cached_profile", "machine_facts", "measured_costs"]
__all__ += ["require_same_plans", "undisturbed"]
__all__ += ["STEPS_BUDGET_S", "cached_observed", "cached_plans", "kept_observed", "observe_steps"]
__all__ += ["Capabilities", "require_runnable", "runnable_kinds"]
__all__ += ["Recorder", "active_recorder", "in_layer", "record_with", "recorded", "span"]
__all__ += ["WorkBar", "make_display"]
