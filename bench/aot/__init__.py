"""Launches that the library would make on a GPU, found out and compiled without one.

    with standin.recording(90) as launches:         # sm_90; every launch is noted, none is made
        layers.run(shape)                           # or any code of the library, on tensors of device "meta"
    for done in compiling.compile_all(launches):    # in processes, one a core; as they are done
        print(done.launch, done.seconds, done.error)

What is compiled lies in Triton's cache afterwards, under the key under which a launch on a GPU looks for it.
"""
