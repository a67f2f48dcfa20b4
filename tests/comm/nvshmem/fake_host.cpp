// Replaces libnvshmem_host.so.3 on machines without a GPU: symmetric memory is in files mapped by the processes, and
// stream operations run immediately. Calls are logged to $FAKE_NVSHMEM/log.PID.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

int rank = -1, ranks = 0, ids = 0, allocations = 0;
bool open_job = false;
std::string job;
std::map<char *, std::pair<size_t, std::vector<char *>>> memory;

std::string folder() { return std::getenv("FAKE_NVSHMEM"); }

void note(const std::string &what) {
    FILE *file = std::fopen((folder() + "/log." + std::to_string(getpid())).c_str(), "a");
    std::fprintf(file, "%s\n", what.c_str());
    std::fclose(file);
}

char *map(const std::string &name, size_t bytes, bool make) {
    const std::string path = folder() + "/" + name;
    int file;
    if (make) {
        file = open((path + ".new").c_str(), O_RDWR | O_CREAT, 0600);
        if (ftruncate(file, bytes)) std::abort();
        std::rename((path + ".new").c_str(), path.c_str());
    } else {
        while ((file = open(path.c_str(), O_RDWR)) < 0) usleep(1000);
    }
    void *where = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return static_cast<char *>(where);
}

char *at(const void *pointer, int pe) {
    for (const auto &[start, entry] : memory) {
        const ptrdiff_t offset = static_cast<const char *>(pointer) - start;
        if (offset >= 0 && offset < static_cast<ptrdiff_t>(entry.first)) return entry.second[pe] + offset;
    }
    std::abort();
}

std::atomic<uint64_t> &word(void *where) { return *static_cast<std::atomic<uint64_t> *>(where); }

}  // namespace

extern "C" {

void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch) { *major = 3, *minor = 4, *patch = 99; }
int nvshmemx_init_status() { return open_job ? 2 : 0; }
int nvshmemx_get_uniqueid(void *id) {
    std::memset(id, 0, 128);
    std::snprintf(static_cast<char *>(id), 128, "job%d.%d", getpid(), ids++);
    return 0;
}

struct Arguments {
    const char *id;
    int rank, ranks;
} given;

int nvshmemx_set_attr_uniqueid_args(int own, int all, const void *id, void *) {
    given = {static_cast<const char *>(id), own, all};
    return 0;
}
int nvshmemx_hostlib_init_attr(unsigned, void *) {
    if (std::getenv("FAKE_INIT_FAILS") && std::atoi(std::getenv("FAKE_INIT_FAILS")) == given.rank) return 7;
    job = given.id, allocations = 0, rank = given.rank, ranks = given.ranks, open_job = true;
    note("init " + std::to_string(rank) + " of " + std::to_string(ranks));
    map(job + ".here." + std::to_string(rank), 8, true);
    for (int pe = 0; pe < ranks; ++pe) map(job + ".here." + std::to_string(pe), 8, false);
    return 0;
}
void nvshmemx_hostlib_finalize() {
    note("finalize");
    open_job = false;
}
int nvshmem_my_pe() { return rank; }
int nvshmem_n_pes() { return ranks; }

void *nvshmem_malloc(size_t bytes) {
    if (bytes > (1 << 20)) return nullptr;
    note("malloc");
    const std::string name = job + ".memory" + std::to_string(allocations++) + ".";
    std::vector<char *> copies(ranks);
    copies[rank] = map(name + std::to_string(rank), bytes, true);
    // Uninitialized, like NVSHMEM's memory.
    std::memset(copies[rank], 0xEE, bytes);
    for (int pe = 0; pe < ranks; ++pe)
        if (pe != rank) copies[pe] = map(name + std::to_string(pe), bytes, false);
    memory[copies[rank]] = {bytes, copies};
    return copies[rank];
}
void nvshmem_free(void *pointer) {
    note("free");
    memory.erase(static_cast<char *>(pointer));
}
void *nvshmem_ptr(const void *pointer, int pe) {
    return pe == rank || !std::getenv("FAKE_OTHER_NODE") ? at(pointer, pe) : nullptr;
}
void nvshmemx_putmem_signal_on_stream(void *dest, const void *source, size_t bytes, uint64_t *signal, uint64_t value,
                                      int operation, int pe, void *) {
    if (operation != 9) std::abort();
    std::memcpy(at(dest, pe), source, bytes);
    word(at(signal, pe)).store(value, std::memory_order_release);
}
void nvshmemx_signal_wait_until_on_stream(uint64_t *signal, int comparison, uint64_t value, void *) {
    if (comparison != 5) std::abort();
    for (int look = 0; word(signal).load(std::memory_order_acquire) < value; ++look) {
        if (look > 100000) std::abort();
        usleep(100);
    }
}
int nvshmemx_barrier_all_on_stream(void *) {
    note("barrier");
    return 0;
}
int nvshmemx_cumodule_init(void *module) {
    note("module " + std::to_string(reinterpret_cast<uintptr_t>(module)));
    return reinterpret_cast<uintptr_t>(module) == 13 ? 5 : 0;
}
int nvshmemx_cumodule_finalize(void *module) {
    note("module " + std::to_string(reinterpret_cast<uintptr_t>(module)) + " out");
    return 0;
}
}
