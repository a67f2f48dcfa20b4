"""Memory that the C library keeps from one step to the next: one opt-in, for a whole process."""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1 << 26


def keep_memory() -> bool:
    """Lets this process keep the memory of tensors on a CPU that it frees, for those that it makes next.

    By default glibc returns each large tensor's memory to the system when the tensor goes, and the system clears every
    page of it when it is asked for the next one: a training step of fixed shapes pays for hundreds of megabytes of
    zeros that nobody reads. This call sets three of glibc's parameters (`man mallopt`): large blocks come from the heap
    and not from the system one by one (`M_MMAP_MAX`), the heap never shrinks (`M_TRIM_THRESHOLD`), and it grows by 64
    MiB at a time (`M_TOP_PAD`). No number changes. Call it once, before the first large tensor; `fusedmoe train` does.

    The price: the process holds the most memory that it has ever used until it ends, and somewhat more, because a block
    in the middle of the heap fits only what is no larger than it. That is the right trade for a job that trains, and
    the wrong one for a process that uses much memory once and then shares the machine. `malloc_trim(3)` returns what is
    free. Threads other than the first have heaps of their own, of 64 MiB, and return what is larger.

    It is for the CPU only: PyTorch keeps a GPU's memory by itself.

    Returns:
        Whether it took effect: False, and nothing changed, where the C library is not glibc (macOS, Windows, musl).
            Where another allocator is preloaded (jemalloc, tcmalloc) it returns True, and changes nothing.
    """
    try:
        library = ctypes.CDLL(None)
    except TypeError:
        # Windows has no such handle.
        return False
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all([library.mallopt(name, value) == 1 for name, value in settings])
