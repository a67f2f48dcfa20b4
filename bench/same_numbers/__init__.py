"""Compare the numbers that two versions of the library compute: a net under changes that should not alter any.

    python -m bench.same_numbers COMMIT              # the working tree against COMMIT
    python -m bench.same_numbers COMMIT --only lora  # only the runs whose names contain "lora"

`runs` lists the runs; `programs_*` hold what they execute, through public names only, so that both versions execute
them. `process` is one rank; `launch` starts ranks for one version; `verdict` compares two records.
"""
