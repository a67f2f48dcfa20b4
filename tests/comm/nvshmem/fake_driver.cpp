// Replaces libcuda.so.1, with one GPU, for the calls of the library and its binding.
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {

int cuInit(unsigned) {
    const char *error = std::getenv("FAKE_CUINIT");
    return error ? std::atoi(error) : 0;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}
int cuCtxGetCurrent(void **context) {
    static int something;
    *context = std::getenv("FAKE_NO_CONTEXT") ? nullptr : &something;
    return 0;
}
// Modules with an odd handle have NVSHMEM's device functions.
int cuModuleGetGlobal_v2(uint64_t *, size_t *, void *module, const char *name) {
    if (std::strcmp(name, "nvshmemi_device_state_d")) std::abort();
    return reinterpret_cast<uintptr_t>(module) % 2 ? 0 : 500;
}
}
