// What the machine can do at most, measured by code that shares nothing with the engine: the check of `baton bench engine --limits`.
//
//     cc -O2 -pthread benchmarks/engine/peaks.c -o peaks && ./peaks THREADS BYTES
//
// It prints JSON: operations a second of 8-bit dot products and of f32 products with additions, and bytes a second of reading a
// range of so many bytes. The instructions are chosen as the engine chooses them: AVX-512 VNNI, else
// AVX-VNNI, else AVX2. It knows no ARM.

#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { REPEATS = 5, THREADS_MAX = 256 };
static const double MEASURED_S = 0.06;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static volatile int sink;

__attribute__((target("avx512f,avx512vnni"))) static double dot_512(void) {
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5), s[16];
    for (int i = 0; i < 16; i++) s[i] = _mm512_setzero_si512();
    for (int round = 0; round < 20000; round++) {
        asm volatile("" : "+v"(a));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) s[i] = _mm512_dpbusd_epi32(s[i], a, b);
    }
    for (int i = 1; i < 16; i++) s[0] = _mm512_add_epi32(s[0], s[i]);
    sink += _mm512_reduce_add_epi32(s[0]);
    return 20000.0 * 16 * 64 * 2;
}

__attribute__((target("avx512f"))) static double fma_512(void) {
    __m512 a = _mm512_set1_ps(1.000001f), b = _mm512_set1_ps(0.5f), s[16];
    for (int i = 0; i < 16; i++) s[i] = _mm512_setzero_ps();
    for (int round = 0; round < 20000; round++) {
        asm volatile("" : "+v"(a));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) s[i] = _mm512_fmadd_ps(s[i], a, b);
    }
    for (int i = 1; i < 16; i++) s[0] = _mm512_add_ps(s[0], s[i]);
    sink += _mm512_reduce_add_ps(s[0]) > 0;
    return 20000.0 * 16 * 16 * 2;
}

__attribute__((target("avx2"))) static double dot_256(void) {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1), s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_si256();
    for (int round = 0; round < 20000; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            asm volatile("" : "+x"(a));
            s[i] = _mm256_add_epi32(s[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
        }
    }
    for (int i = 1; i < 8; i++) s[0] = _mm256_add_epi32(s[0], s[i]);
    sink += _mm256_extract_epi32(s[0], 0);
    return 20000.0 * 8 * 32 * 2;
}

__attribute__((target("avx2,avxvnni"))) static double dot_vnni_256(void) {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), s[12];
    for (int i = 0; i < 12; i++) s[i] = _mm256_setzero_si256();
    for (int round = 0; round < 20000; round++) {
        asm volatile("" : "+x"(a));
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) s[i] = _mm256_dpbusd_avx_epi32(s[i], a, b);
    }
    for (int i = 1; i < 12; i++) s[0] = _mm256_add_epi32(s[0], s[i]);
    sink += _mm256_extract_epi32(s[0], 0);
    return 20000.0 * 12 * 32 * 2;
}

__attribute__((target("avx2,fma"))) static double fma_256(void) {
    __m256 a = _mm256_set1_ps(1.000001f), b = _mm256_set1_ps(0.5f), s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_ps();
    for (int round = 0; round < 20000; round++) {
        asm volatile("" : "+x"(a));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) s[i] = _mm256_fmadd_ps(s[i], a, b);
    }
    for (int i = 1; i < 8; i++) s[0] = _mm256_add_ps(s[0], s[i]);
    sink += _mm256_cvtss_f32(s[0]) > 0;
    return 20000.0 * 8 * 8 * 2;
}

static char *range;
static size_t share;

__attribute__((target("avx2"))) static double read_part(const char *from, size_t bytes) {
    __m256i s[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t at = 0; at + 128 <= bytes; at += 128)
        for (int i = 0; i < 4; i++) s[i] = _mm256_xor_si256(s[i], _mm256_load_si256((const __m256i *)(from + at + 32 * i)));
    s[0] = _mm256_xor_si256(_mm256_xor_si256(s[0], s[1]), _mm256_xor_si256(s[2], s[3]));
    sink += _mm256_extract_epi32(s[0], 0);
    return bytes / 128 * 128.0;
}

enum what { DOT, FMA, READ };
static int has_512, has_vnni_256;
static pthread_barrier_t start;

struct job {
    enum what what;
    size_t thread;
    double rate;
};

static double once(const struct job *job) {
    if (job->what == DOT) return has_512 ? dot_512() : has_vnni_256 ? dot_vnni_256() : dot_256();
    if (job->what == FMA) return has_512 ? fma_512() : fma_256();
    return read_part(range + job->thread * share, share);
}

static void *measure(void *argument) {
    struct job *job = argument;
    double done = 0, began, took;
    once(job);
    pthread_barrier_wait(&start);
    began = now();
    do {
        done += once(job);
        took = now() - began;
    } while (took < MEASURED_S);
    job->rate = done / took;
    return NULL;
}

static double rate(enum what what, size_t threads) {
    pthread_t others[THREADS_MAX];
    struct job jobs[THREADS_MAX];
    double sum = 0;
    pthread_barrier_init(&start, NULL, threads);
    for (size_t i = 0; i < threads; i++) jobs[i] = (struct job){what, i, 0};
    for (size_t i = 1; i < threads; i++) pthread_create(&others[i], NULL, measure, &jobs[i]);
    measure(&jobs[0]);
    for (size_t i = 1; i < threads; i++) pthread_join(others[i], NULL);
    for (size_t i = 0; i < threads; i++) sum += jobs[i].rate;
    pthread_barrier_destroy(&start);
    return sum;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(enum what what, size_t threads) {
    double rates[REPEATS];
    for (int i = 0; i < REPEATS; i++) rates[i] = rate(what, threads);
    qsort(rates, REPEATS, sizeof *rates, ascending);
    return rates[REPEATS / 2];
}

int main(int count, char **arguments) {
    size_t threads = count > 1 ? strtoul(arguments[1], NULL, 10) : 0;
    size_t bytes = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    if (threads < 1 || threads > THREADS_MAX || bytes < 1 << 20) {
        fprintf(stderr, "usage: peaks THREADS BYTES (at least a MiB)\n");
        return 2;
    }
    has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
    if (!has_512 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
        fprintf(stderr, "peaks: this machine has neither AVX-512 VNNI nor AVX2\n");
        return 4;
    }
    // Leaf 7, subleaf 1, bit 4 of EAX. Compilers older than GCC 11 do not know it by name.
    unsigned eax, ebx, ecx, edx;
    has_vnni_256 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
    share = bytes / threads / 128 * 128;
    if (posix_memalign((void **)&range, 2 << 20, bytes)) return 1;
    madvise(range, bytes, MADV_HUGEPAGE);
    memset(range, 1, bytes);
    printf("{\"int8_ops_per_second\": %.0f, \"f32_ops_per_second\": %.0f, \"read_bytes_per_second\": %.0f}\n", median(DOT, threads),
           median(FMA, threads), median(READ, threads));
    return 0;
}
