// Which instruction sets this machine has. Compiled for the baseline: it must run where the kernels may not.
#include "graft.h"

#include <sys/mman.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

uint64_t enabled_state() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

}  // namespace

// A bit per level: 0 AVX2 + FMA + F16C, 1 AVX-512 F/BW/VL/DQ, 2 AVX-512 BF16 + VBMI, 3 AMX BF16. A bit is set only if
// the operating system keeps the registers too.
GRAFT_API uint32_t graft_cpu_levels() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    bool has_xsave = c & (1u << 27), fma = c & (1u << 12), f16c = c & (1u << 29);
    if (!has_xsave) return 0;
    uint64_t state = enabled_state();
    uint32_t b7, c7, d7;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
    uint32_t levels = 0;
    bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    if (ymm && fma && f16c && (b7 & (1u << 5))) levels |= 1;
    uint32_t avx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    if (levels && zmm && (b7 & avx512) == avx512) levels |= 2;
    uint32_t a71;
    bool vbmi = c7 & (1u << 1);
    if ((levels & 2) && vbmi && __get_cpuid_count(7, 1, &a71, &b, &c, &d) && (a71 & (1u << 5))) levels |= 4;
    uint32_t amx = (1u << 22) | (1u << 24);
    if ((levels & 4) && tiles && (d7 & amx) == amx) levels |= 8;
    return levels;
}

// Asks the kernel for the tile registers, once per process. 0: granted.
GRAFT_API int graft_request_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;
    return int(syscall(SYS_arch_prctl, kRequest, kTileData));
}
#else
GRAFT_API uint32_t graft_cpu_levels() { return 0; }
GRAFT_API int graft_request_tiles() { return -1; }
#endif

// Asks for huge pages under [start, start + bytes), before it is first written. Failure costs speed alone.
GRAFT_API int graft_advise_huge_pages(void *start, int64_t bytes) {
    constexpr uintptr_t kPage = 1u << 21;
    uintptr_t first = (uintptr_t(start) + kPage - 1) & ~(kPage - 1);
    uintptr_t last = (uintptr_t(start) + uintptr_t(bytes)) & ~(kPage - 1);
    return first < last ? madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE) : 0;
}
