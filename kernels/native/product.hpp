// y = x W^T + b for the weights W of a layer, float32 or bfloat16, computed in float32.
//
// Each number of y is the sum, in order, of chains of DEPTH fused multiply-adds over the inputs in their order. So its bits
// depend neither on the other rows nor on threads, on whether the weights are packed, or on the instruction set.
//
// A panel is COLUMNS columns of y. A chunk of it, DEPTH inputs, is held in the first-level cache while all rows pass.
// Packed weights have the order [panel][input][column of the panel], so that memory is read once, from its start to its
// end; plain ones are transposed chunk by chunk, or packed for this product.

#pragma once
#include "vector.hpp"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr int COLUMNS = 3 * LANES, ROWS = LANES == 16 ? 8 : 4, DEPTH = 96;
constexpr long HELD = 1 << 18;  // bytes of the rows that pass through all panels: half of a second-level cache
constexpr long FEW_ROWS = 64;   // with more of them plain weights are packed first

inline long whole_lines(long bytes) { return (bytes + 63) / 64 * 64; }

struct Scratch {  // memory of one call; at: 0 if there is none left
    char* at;
    explicit Scratch(long bytes) : at((char*)aligned_alloc(64, whole_lines(bytes))) {}
    ~Scratch() { free(at); }
};

inline long panels_of(long num_out) { return (num_out + COLUMNS - 1) / COLUMNS; }

// sums[R][COLUMNS] (0 if first) += x[R][depth] chunk[depth][COLUMNS]. ahead, next: the weights and rows read after that.
template <int R>
inline void multiply(const float* x, long stride, const float* chunk, long depth, float* sums, bool first,
                     const char* ahead, long lines, const float* next) {
    vec acc[R][3];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 3; v++) acc[r][v] = every(0.0f);
    for (long k = 0; k < depth; k++) {
        const float* w = chunk + k * COLUMNS;
        vec w0 = load(w), w1 = load(w + LANES), w2 = load(w + 2 * LANES);
        if ((k & 3) == 0 && k / 4 < lines) _mm_prefetch(ahead + 64 * (k / 4), _MM_HINT_T1);
        if ((k & 3) == 2) _mm_prefetch((const char*)(next + (k / 4 & 3) * stride + k / 16 * 16), _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec a = every(x[r * stride + k]);
            acc[r][0] = fma(a, w0, acc[r][0]);
            acc[r][1] = fma(a, w1, acc[r][1]);
            acc[r][2] = fma(a, w2, acc[r][2]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 3; v++) {
            float* to = sums + r * COLUMNS + v * LANES;
            store(to, first ? acc[r][v] : load(to) + acc[r][v]);
        }
}

inline __m256 eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 eight(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

// to[k][c] = from[c][k] for 8 x 8 numbers.
template <class W>
inline void transposed_8x8(const W* from, long num_in, float* to) {
    __m256 r[8];
    for (int i = 0; i < 8; i++) r[i] = eight(from + i * num_in);
    turned(r);
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * COLUMNS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * COLUMNS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

// A chunk of plain weights [columns, num_in], transposed; missing columns are 0.
template <class W>
inline void transposed(const W* weight, long num_in, long columns, long depth, float* chunk) {
    for (long c = 0; c < COLUMNS; c += 8) {
        long k = 0;
        if (c + 8 <= columns)
            for (; k + 8 <= depth; k += 8) transposed_8x8(weight + c * num_in + k, num_in, chunk + k * COLUMNS + c);
        for (; k < depth; k++)
            for (long i = c; i < c + 8; i++) chunk[k * COLUMNS + i] = i < columns ? wide(weight[i * num_in + k]) : 0.0f;
    }
}
template <class W>
inline void widened(const W* packed, long count, float* chunk) {
    for (long i = 0; i < count; i += LANES) store(chunk + i, load(packed + i));
}

inline void narrowed(const float* chunk, long count, float* packed) { memcpy(packed, chunk, count * sizeof(float)); }
inline void narrowed(const float* chunk, long count, bf16* packed) {
    for (long i = 0; i < count; i++) put(packed + i, chunk[i]);
}

template <class W>
void pack(const W* weight, long num_out, long num_in, W* packed) {
    long num_panels = panels_of(num_out);
#pragma omp parallel for schedule(static)
    for (long panel = 0; panel < num_panels; panel++) {
        float chunk[DEPTH * COLUMNS];
        long first = panel * COLUMNS, columns = num_out - first < COLUMNS ? num_out - first : COLUMNS;
        for (long start = 0; start < num_in; start += DEPTH) {
            long depth = num_in - start < DEPTH ? num_in - start : DEPTH;
            transposed(weight + first * num_in + start, num_in, columns, depth, chunk);
            narrowed(chunk, depth * COLUMNS, packed + first * num_in + start * COLUMNS);
        }
    }
}

template <class T>
struct Product {
    const T *x, *weight, *bias;
    T* y;
    long num_rows, num_in, num_out, stride_x, stride_y;
    bool is_packed;
};

template <class T>
void panel_of(const Product<T>& p, long panel, long row, long rows, const float* x, float* chunk, float* sums) {
    long first = panel * COLUMNS, columns = p.num_out - first < COLUMNS ? p.num_out - first : COLUMNS;
    for (long start = 0; start < p.num_in; start += DEPTH) {
        long depth = p.num_in - start < DEPTH ? p.num_in - start : DEPTH, lines = 0;
        const float* w = chunk;
        const char* ahead = 0;
        if (p.is_packed) {
            const T* from = p.weight + first * p.num_in + start * COLUMNS;
            if (sizeof(T) == 4) w = (const float*)from;
            else widened(from, depth * COLUMNS, chunk);
            ahead = (const char*)(from + depth * COLUMNS);
            lines = depth * COLUMNS * sizeof(T) / 64;
        } else
            transposed(p.weight + first * p.num_in + start, p.num_in, columns, depth, chunk);
        for (long r = 0; r < rows; r += ROWS) {
            const float* from = x + r * p.num_in + start;
            float* to = sums + r * COLUMNS;
            long done = r / ROWS * (depth / 4), left = lines - done < 0 ? 0 : lines - done;
            const float* next = x + (r + 2 * ROWS <= rows ? r + ROWS : 0) * p.num_in + start;
            switch (rows - r < ROWS ? rows - r : ROWS) {
#define CASE(R) case R: multiply<R>(from, p.num_in, w, depth, to, start == 0, ahead + 64 * done, left, next); break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#if LANES == 16
                CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
            }
        }
    }
    for (long r = 0; r < rows; r++) {
        T* to = p.y + (row + r) * p.stride_y + first;
        const float* from = sums + r * COLUMNS;
        if (columns == COLUMNS && !p.bias)
            for (int c = 0; c < COLUMNS; c += 1) put(to + c, from[c]);
        else
            for (long c = 0; c < columns; c++) put(to + c, p.bias ? from[c] + wide(p.bias[first + c]) : from[c]);
    }
}

// Rows that pass together through the panels: they and the sums of a panel stay in the caches.
inline long rows_at_once(long num_in, long num_rows) {
    long size = HELD / 4 / num_in / ROWS * ROWS;
    size = size < 4 * ROWS ? 4 * ROWS : size;
    return size < num_rows ? size : num_rows;
}
// Of a thread: a chunk and the sums.
inline long own_bytes(long size) { return whole_lines((DEPTH + size) * COLUMNS * 4); }

template <class T>
bool product(Product<T> p) {
    long num_panels = panels_of(p.num_out), size = rows_at_once(p.num_in, p.num_rows);
    long num_blocks = (p.num_rows + size - 1) / size, num_threads = omp_get_max_threads();
    long grain = num_panels * num_blocks / (8 * num_threads);  // small: a thread that has to wait does less
    grain = grain > 0 ? grain : 1;
    bool widens = sizeof(T) != 4 || p.stride_x != p.num_in, packs = !p.is_packed && p.num_rows > FEW_ROWS;
    long own = own_bytes(size);
    Scratch scratch(num_threads * own + (widens ? whole_lines(p.num_rows * p.num_in * 4) : 0) +
                    (packs ? num_panels * COLUMNS * p.num_in * sizeof(T) : 0));
    if (!scratch.at) return false;
    const float* x = (const float*)p.x;
    float* rows = (float*)(scratch.at + num_threads * own);
    if (widens) x = rows;
    if (packs) {
        T* packed = (T*)(scratch.at + num_threads * own + (widens ? whole_lines(p.num_rows * p.num_in * 4) : 0));
        pack(p.weight, p.num_out, p.num_in, packed);
        p.weight = packed, p.is_packed = true;
    }
#pragma omp parallel num_threads(num_threads)
    {
        if (widens) {
#pragma omp for schedule(static)
            for (long r = 0; r < p.num_rows; r++)
                for (long k = 0; k < p.num_in; k++) rows[r * p.num_in + k] = wide(p.x[r * p.stride_x + k]);
        }
        float *chunk = (float*)(scratch.at + omp_get_thread_num() * own), *sums = chunk + DEPTH * COLUMNS;
#pragma omp for schedule(dynamic, grain)
        for (long task = 0; task < num_panels * num_blocks; task++) {
            long row = task / num_panels * size, count = p.num_rows - row < size ? p.num_rows - row : size;
            panel_of(p, task % num_panels, row, count, x + row * p.num_in, chunk, sums);
        }
    }
    return true;
}

// Rows starts[e] to starts[e + 1] of x by matrix e: weights[e] is its address. x and y are contiguous.
template <class T>
struct Products {
    const T* x;
    const int64_t *weights, *starts;
    T* y;
    long num_matrices, num_in, num_out, is_packed;
};

// One parallel region for all matrices: a decode step has many, each with a few rows.
template <class T>
bool products(const Products<T>& p) {
    long num_panels = panels_of(p.num_out), num_rows = p.starts[p.num_matrices], most = 1;
    for (long e = 0; e < p.num_matrices; e++) {
        long rows = p.starts[e + 1] - p.starts[e];
        most = rows > most ? rows : most;
    }
    long size = rows_at_once(p.num_in, most), own = own_bytes(size), num_threads = omp_get_max_threads();
    long grain = num_panels / (4 * num_threads);
    grain = grain > 0 ? grain : 1;
    bool widens = sizeof(T) != 4;
    Scratch scratch(num_threads * own + (widens ? num_rows * p.num_in * 4 : 0));
    if (!scratch.at) return false;
    float* wide_x = (float*)(scratch.at + num_threads * own);
    const float* x = widens ? wide_x : (const float*)p.x;
#pragma omp parallel num_threads(num_threads)
    {
        if (widens) {
#pragma omp for schedule(static)
            for (long i = 0; i < num_rows * p.num_in; i++) wide_x[i] = wide(p.x[i]);
        }
        float *chunk = (float*)(scratch.at + omp_get_thread_num() * own), *sums = chunk + DEPTH * COLUMNS;
#pragma omp for schedule(dynamic, grain)
        for (long task = 0; task < p.num_matrices * num_panels; task++) {
            long e = task / num_panels;
            for (long row = p.starts[e]; row < p.starts[e + 1]; row += size) {
                long left = p.starts[e + 1] - row;
                Product<T> one{0, (const T*)p.weights[e], 0, p.y, 0, p.num_in, p.num_out, 0, p.num_out, p.is_packed != 0};
                panel_of(one, task % num_panels, row, left < size ? left : size, x + row * p.num_in, chunk, sums);
            }
        }
    }
    return true;
}

}  // namespace
