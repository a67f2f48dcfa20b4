/* The NVSHMEM transport as a plain C interface, which any language can load.
 *
 * One NVSHMEM job a process: its processing elements (PEs) are the ranks that opened it together. Symmetric memory is
 * allocated by all of them, in the same order and with the same sizes; every address below is one of this process, and
 * a PE says whose memory at that place is meant.
 *
 * Every function but the last two returns FUSEDMOE_NVSHMEM_OK or another of the statuses; then
 * fusedmoe_nvshmem_last_error has the reason and the cure. NVSHMEM itself ends the process where it finds no GPU, so
 * that is looked at first. Calls of several threads are safe as long as no two run at once; init, adopt, finalize,
 * allocate and free wait for the other PEs, without a bound of their own.
 *
 * Only NVSHMEM's host library is linked: kernels bring the device functions themselves, as bitcode, and their modules
 * are registered here. So the library has no machine code for any particular GPU, and needs no nvcc.
 */
#ifndef FUSEDMOE_NVSHMEM_H
#define FUSEDMOE_NVSHMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FUSEDMOE_NVSHMEM_API __attribute__((visibility("default")))

/* Bytes of a unique id. */
#define FUSEDMOE_NVSHMEM_ID_BYTES 128

enum {
    FUSEDMOE_NVSHMEM_OK = 0,
    FUSEDMOE_NVSHMEM_NO_GPU = 1,     /* no driver, no GPU, or no CUDA context in this thread */
    FUSEDMOE_NVSHMEM_MISUSE = 2,     /* an argument or an order of calls that cannot work */
    FUSEDMOE_NVSHMEM_NO_MEMORY = 3,  /* the symmetric heap has no room */
    FUSEDMOE_NVSHMEM_FAILED = 4      /* NVSHMEM or the driver said so */
};

/* Who initialised NVSHMEM in this process. */
enum {
    FUSEDMOE_NVSHMEM_CLOSED = 0,
    FUSEDMOE_NVSHMEM_OURS = 1,
    FUSEDMOE_NVSHMEM_OTHERS = 2
};

/* Is there a driver with a GPU? Touches no context and starts nothing. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_probe(void);

/* Major, minor and patch of the NVSHMEM that this library was built with, and of the one that is loaded. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_version(int built[3], int loaded[3]);

/* Makes the id of a new job: one rank makes it, all are given it. bytes: the room at `id`. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_unique_id(void *id, size_t bytes);

/* Starts the job of this id, on the GPU whose context is current. Collective over all its ranks. Where a module cannot
 * be registered it returns FAILED, and the job is open without a use: finalize, which waits for the other PEs, ends it. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_init(const void *id, size_t bytes, int rank, int ranks);

/* Uses the NVSHMEM that this process has already initialised, here or elsewhere. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_adopt(void);

/* Ends one use. With the last one, or without any, ends a job that was started here; one that was started elsewhere
 * goes on. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_finalize(void);

/* Who initialised NVSHMEM, this PE, the number of PEs, and the id of a job that was started here (else zeros);
 * `id` may be null. Closed: PE -1 of 0. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_state(int *owner, int *pe, int *pes, void *id);

/* Symmetric memory, at least 512-byte aligned and not cleared. Collective over all PEs. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_allocate(size_t bytes, void **pointer);
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_free(void *pointer);

/* Where this GPU's kernels find a PE's copy of symmetric memory; null where they cannot address it. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_peer_pointer(const void *pointer, int pe, void **peer);

/* On a stream: copies bytes to `dest` on a PE and then sets its `signal`, which says that they have arrived. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_put_signal(void *dest, const void *source, size_t bytes, uint64_t *signal,
                                                     uint64_t value, int pe, void *stream);

/* On a stream: waits until this PE's `signal` is at least `value`. The stream waits without a bound: who calls it must
 * look at the stream with one. A kernel can wait with a bound of its own. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_wait(uint64_t *signal, uint64_t value, void *stream);

/* On a stream: waits for all PEs and for everything they have put. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_barrier(void *stream);

/* A loaded CUDA module (CUmodule): where it has NVSHMEM's device functions in it, gives it what they need to know, now
 * and again whenever a job begins. Without them it is left alone. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_register_module(void *module);

/* How many modules were registered that have NVSHMEM's device functions. */
FUSEDMOE_NVSHMEM_API int fusedmoe_nvshmem_modules(void);

/* Why the last call of this thread did not return FUSEDMOE_NVSHMEM_OK; "" if it did. Valid until the next one. */
FUSEDMOE_NVSHMEM_API const char *fusedmoe_nvshmem_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
