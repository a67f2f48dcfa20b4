"""Compare the results of two versions of the library, as a regression test for changes that should not alter any.

    python -m bench.same_numbers COMMIT              # the working tree against COMMIT
    python -m bench.same_numbers COMMIT --only lora  # only the runs whose names contain "lora"

`runs` lists the runs; `programs_*` contain their code, which uses public names only, so that both versions can execute
it. `process` is one rank; `launch` starts ranks for one version; `verdict` compares two records.
"""
