"""Record the kernel launches of a layer without a GPU, and compile them ahead of time.

    with standin.recording(90) as launches:         # sm_90; launches are recorded, not executed
        layers.run(shape)                           # or any library code on tensors of device "meta"
    for done in compiling.compile_all(launches):    # in one process per core, as completed
        print(done.launch, done.seconds, done.error)

The compiled kernels are then in Triton's cache, under the keys that launches on a GPU use.
"""
