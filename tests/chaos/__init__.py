"""The fault campaign: draws faults from a seed, injects them into working ranks, and judges the outcomes.

    python -m tests.chaos --help

`jobs`: the ranks' work.  `faults`: the faults and their places.  `ranks`: processes that run jobs one after another and
are checked for leftovers.  `campaign`: draws cases, runs them and judges.  `long_jobs`, `flatness`: long runs with
their own commands.  The package contains no test hooks: a profile function, which Python calls at each function call
of the faulty rank, injects the fault.
"""
