"""The campaign: faults drawn from a seed, put into ranks at work, and what became of each.

    python -m tests.chaos --help

`jobs`: what ranks do.  `faults`: what is done to them, where.  `ranks`: processes that do jobs, one after another, and
are looked through for leftovers.  `campaign`: draws cases, runs them and judges.  `long_jobs`, `flatness`: long runs,
commands of their own.  Nothing of it is in the package: a fault comes from a profile function, which Python calls
whenever the rank at fault calls a function.
"""
