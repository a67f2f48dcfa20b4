"""Opt-in setting of the C library to keep freed memory between training steps."""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1 << 26


def keep_memory() -> bool:
    """Keep freed CPU tensor memory in this process for later tensors. Results do not change.

    By default, glibc returns the memory of each large tensor to the system, which clears every page before reuse. This
    call sets three glibc parameters (`man mallopt`): large blocks come from the heap (`M_MMAP_MAX`), the heap never
    shrinks (`M_TRIM_THRESHOLD`), and it grows by 64 MiB at a time (`M_TOP_PAD`). Call it once, before the first large
    tensor; `fusedmoe train` does.

    The process then holds its peak memory, plus fragmentation, until it exits; `malloc_trim(3)` releases free memory.
    Other threads have separate heaps of 64 MiB and still return larger blocks. PyTorch caches GPU memory itself.

    Returns:
        Whether it took effect: False if the C library is not glibc (macOS, Windows, musl). With a preloaded allocator
            (jemalloc, tcmalloc) it returns True without an effect.
    """
    try:
        library = ctypes.CDLL(None)
    except TypeError:
        # Windows has no handle of the process.
        return False
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all([library.mallopt(name, value) == 1 for name, value in settings])
