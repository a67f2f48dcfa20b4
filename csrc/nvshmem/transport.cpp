#include "fusedmoe_nvshmem.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <nvshmem_host.h>

static_assert(sizeof(nvshmemx_uniqueid_t) == FUSEDMOE_NVSHMEM_ID_BYTES, "the header says how long an id is");

namespace {

thread_local std::string last_error;

int fail(int status, std::string reason) {
    last_error = std::move(reason);
    return status;
}

int ok() {
    last_error.clear();
    return FUSEDMOE_NVSHMEM_OK;
}

// The driver, found at run time: a process without one must be able to load this library and be told so.
struct Driver {
    CUresult (*init)(unsigned) = nullptr;
    CUresult (*device_count)(int *) = nullptr;
    CUresult (*current_context)(CUcontext *) = nullptr;
    CUresult (*global)(CUdeviceptr *, size_t *, CUmodule, const char *) = nullptr;
    std::string missing;

    Driver() {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (library == nullptr) {
            missing = "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)";
            return;
        }
        find(library, "cuInit", init);
        find(library, "cuDeviceGetCount", device_count);
        find(library, "cuCtxGetCurrent", current_context);
        find(library, "cuModuleGetGlobal_v2", global);
    }

    template <typename Function>
    void find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr) missing = std::string("the NVIDIA driver here has no ") + name + ": update it";
    }
};

const Driver &driver() {
    static const Driver found;
    return found;
}

// What this process has of NVSHMEM, itself one for a process.
struct Job {
    std::mutex lock;
    bool ours = false;
    int uses = 0;
    std::array<char, FUSEDMOE_NVSHMEM_ID_BYTES> id{};
    std::vector<CUmodule> modules;
};

Job &job() {
    static Job only;
    return only;
}

bool initialised() {
    const int status = nvshmemx_init_status();
    return status >= NVSHMEM_STATUS_IS_INITIALIZED && status != NVSHMEM_STATUS_INVALID;
}

int need_gpu() {
    const Driver &cuda = driver();
    if (!cuda.missing.empty()) return fail(FUSEDMOE_NVSHMEM_NO_GPU, cuda.missing);
    if (const CUresult result = cuda.init(0); result != CUDA_SUCCESS)
        return fail(FUSEDMOE_NVSHMEM_NO_GPU, "the NVIDIA driver does not start (cuInit returned " +
                                                 std::to_string(result) + "); nvidia-smi may say why");
    int devices = 0;
    if (cuda.device_count(&devices) != CUDA_SUCCESS || devices == 0)
        return fail(FUSEDMOE_NVSHMEM_NO_GPU, "the NVIDIA driver finds no GPU; see CUDA_VISIBLE_DEVICES");
    return ok();
}

int need_context() {
    if (const int status = need_gpu()) return status;
    CUcontext context = nullptr;
    if (driver().current_context(&context) != CUDA_SUCCESS || context == nullptr)
        return fail(FUSEDMOE_NVSHMEM_NO_GPU, "this thread has no CUDA context: choose its GPU first");
    return ok();
}

int need_job() {
    if (job().uses == 0 || !initialised())
        return fail(FUSEDMOE_NVSHMEM_MISUSE, "NVSHMEM is not open: call fusedmoe_nvshmem_init or _adopt first");
    return ok();
}

int need_pe(int pe) {
    const int pes = nvshmem_n_pes();
    if (pe < 0 || pe >= pes)
        return fail(FUSEDMOE_NVSHMEM_MISUSE,
                    "there is no PE " + std::to_string(pe) + ", only 0 to " + std::to_string(pes - 1));
    return ok();
}

int initialise_module(CUmodule module) {
    if (const int status = nvshmemx_cumodule_init(module))
        return fail(FUSEDMOE_NVSHMEM_FAILED,
                    "nvshmemx_cumodule_init returned " + std::to_string(status) +
                        ": a kernel must be linked with the bitcode of the NVSHMEM that is loaded");
    return ok();
}

// The last step of opening: modules that were loaded before, or in an earlier job, learn of this one; all or none.
int begin_use() {
    const auto &modules = job().modules;
    for (size_t i = 0; i < modules.size(); ++i)
        if (const int status = initialise_module(modules[i])) {
            while (i > 0) nvshmemx_cumodule_finalize(modules[--i]);
            return status;
        }
    job().uses = 1;
    return ok();
}

}  // namespace

int fusedmoe_nvshmem_probe(void) { return need_gpu(); }

int fusedmoe_nvshmem_version(int built[3], int loaded[3]) {
    if (built == nullptr || loaded == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "version: null argument");
    built[0] = NVSHMEM_VENDOR_MAJOR_VERSION;
    built[1] = NVSHMEM_VENDOR_MINOR_VERSION;
    built[2] = NVSHMEM_VENDOR_PATCH_VERSION;
    nvshmemx_vendor_get_version_info(&loaded[0], &loaded[1], &loaded[2]);
    return ok();
}

int fusedmoe_nvshmem_unique_id(void *id, size_t bytes) {
    if (id == nullptr || bytes != FUSEDMOE_NVSHMEM_ID_BYTES)
        return fail(FUSEDMOE_NVSHMEM_MISUSE, "unique_id: give room for FUSEDMOE_NVSHMEM_ID_BYTES bytes");
    if (const int status = need_gpu()) return status;
    nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (const int status = nvshmemx_get_uniqueid(&made))
        return fail(FUSEDMOE_NVSHMEM_FAILED,
                    "nvshmemx_get_uniqueid returned " + std::to_string(status) +
                        "; it needs a network interface: NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME names one");
    std::memcpy(id, &made, sizeof made);
    return ok();
}

int fusedmoe_nvshmem_init(const void *id, size_t bytes, int rank, int ranks) {
    if (id == nullptr || bytes != FUSEDMOE_NVSHMEM_ID_BYTES || ranks < 1 || rank < 0 || rank >= ranks)
        return fail(FUSEDMOE_NVSHMEM_MISUSE, "init: give an id of FUSEDMOE_NVSHMEM_ID_BYTES bytes and 0 <= rank < ranks");
    if (const int status = need_context()) return status;
    const std::lock_guard<std::mutex> guard(job().lock);
    if (initialised()) return fail(FUSEDMOE_NVSHMEM_MISUSE, "init: NVSHMEM is initialised in this process; adopt it");

    nvshmemx_uniqueid_t given;
    std::memcpy(&given, id, sizeof given);
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    if (const int status = nvshmemx_set_attr_uniqueid_args(rank, ranks, &given, &attributes))
        return fail(FUSEDMOE_NVSHMEM_FAILED,
                    "nvshmemx_set_attr_uniqueid_args returned " + std::to_string(status) + ": is the id one of ours?");
    // Not nvshmemx_init_attr, which ends the process where this returns a status.
    if (const int status = nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes))
        return fail(FUSEDMOE_NVSHMEM_FAILED,
                    "nvshmemx_hostlib_init_attr returned " + std::to_string(status) + "; NVSHMEM_DEBUG=INFO says more");
    if (!initialised()) {
        nvshmemx_hostlib_finalize();
        return fail(FUSEDMOE_NVSHMEM_FAILED, "NVSHMEM started without a GPU; NVSHMEM_DEBUG=INFO says more");
    }
    job().ours = true;
    std::memcpy(job().id.data(), id, bytes);
    return begin_use();
}

int fusedmoe_nvshmem_adopt(void) {
    if (const int status = need_gpu()) return status;
    const std::lock_guard<std::mutex> guard(job().lock);
    if (!initialised()) return fail(FUSEDMOE_NVSHMEM_MISUSE, "adopt: NVSHMEM is not initialised in this process");
    if (job().uses == 0) return begin_use();
    ++job().uses;
    return ok();
}

int fusedmoe_nvshmem_finalize(void) {
    const std::lock_guard<std::mutex> guard(job().lock);
    const bool used = job().uses > 0;
    if (!used && !job().ours) return need_job();
    if ((used && --job().uses > 0) || !job().ours) return ok();
    if (used)  // else a module could not be registered, and none is
        for (CUmodule module : job().modules) nvshmemx_cumodule_finalize(module);
    nvshmemx_hostlib_finalize();
    job().ours = false;
    job().id.fill(0);
    return ok();
}

int fusedmoe_nvshmem_state(int *owner, int *pe, int *pes, void *id) {
    if (owner == nullptr || pe == nullptr || pes == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "state: null argument");
    const std::lock_guard<std::mutex> guard(job().lock);
    const bool open = initialised();
    *owner = !open ? FUSEDMOE_NVSHMEM_CLOSED : job().ours ? FUSEDMOE_NVSHMEM_OURS : FUSEDMOE_NVSHMEM_OTHERS;
    *pe = open ? nvshmem_my_pe() : -1;
    *pes = open ? nvshmem_n_pes() : 0;
    if (id != nullptr) std::memcpy(id, job().id.data(), job().id.size());
    return ok();
}

int fusedmoe_nvshmem_allocate(size_t bytes, void **pointer) {
    if (const int status = need_job()) return status;
    if (bytes == 0 || pointer == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "allocate: give bytes and a place");
    *pointer = nvshmem_malloc(bytes);
    if (*pointer == nullptr)
        return fail(FUSEDMOE_NVSHMEM_NO_MEMORY, "nvshmem_malloc has no room for " + std::to_string(bytes) +
                                                    " bytes: NVSHMEM_SYMMETRIC_SIZE sets the size of its heap, and "
                                                    "NVSHMEM_MAX_MEMORY_PER_GPU how far it may grow");
    return ok();
}

int fusedmoe_nvshmem_free(void *pointer) {
    if (const int status = need_job()) return status;
    if (pointer == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "free: null pointer");
    nvshmem_free(pointer);
    return ok();
}

int fusedmoe_nvshmem_peer_pointer(const void *pointer, int pe, void **peer) {
    if (const int status = need_job()) return status;
    if (pointer == nullptr || peer == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "peer_pointer: null argument");
    if (const int status = need_pe(pe)) return status;
    *peer = nvshmem_ptr(pointer, pe);
    return ok();
}

int fusedmoe_nvshmem_put_signal(void *dest, const void *source, size_t bytes, uint64_t *signal, uint64_t value, int pe,
                                void *stream) {
    if (const int status = need_job()) return status;
    if (dest == nullptr || source == nullptr || bytes == 0 || signal == nullptr)
        return fail(FUSEDMOE_NVSHMEM_MISUSE, "put_signal: null argument, or no bytes");
    if (const int status = need_pe(pe)) return status;
    nvshmemx_putmem_signal_on_stream(dest, source, bytes, signal, value, NVSHMEM_SIGNAL_SET, pe,
                                     static_cast<cudaStream_t>(stream));
    return ok();
}

int fusedmoe_nvshmem_wait(uint64_t *signal, uint64_t value, void *stream) {
    if (const int status = need_job()) return status;
    if (signal == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "wait: null signal");
    nvshmemx_signal_wait_until_on_stream(signal, NVSHMEM_CMP_GE, value, static_cast<cudaStream_t>(stream));
    return ok();
}

int fusedmoe_nvshmem_barrier(void *stream) {
    if (const int status = need_job()) return status;
    nvshmemx_barrier_all_on_stream(static_cast<cudaStream_t>(stream));
    return ok();
}

int fusedmoe_nvshmem_register_module(void *module) {
    if (module == nullptr) return fail(FUSEDMOE_NVSHMEM_MISUSE, "register_module: null module");
    if (const int status = need_gpu()) return status;
    const auto loaded = static_cast<CUmodule>(module);
    CUdeviceptr place = 0;
    size_t bytes = 0;
    if (driver().global(&place, &bytes, loaded, "nvshmemi_device_state_d") != CUDA_SUCCESS) return ok();
    const std::lock_guard<std::mutex> guard(job().lock);
    auto &modules = job().modules;
    if (std::find(modules.begin(), modules.end(), loaded) != modules.end()) return ok();
    if (job().uses > 0)
        if (const int status = initialise_module(loaded)) return status;
    modules.push_back(loaded);
    return ok();
}

int fusedmoe_nvshmem_modules(void) {
    const std::lock_guard<std::mutex> guard(job().lock);
    return static_cast<int>(job().modules.size());
}

const char *fusedmoe_nvshmem_last_error(void) { return last_error.c_str(); }
