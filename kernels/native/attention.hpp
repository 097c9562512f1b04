// Attention of one new token per row over a paged cache (see kernels/decode_attention.py).
//
// A task is a row and a key-value head: the scores of its query heads, a softmax in float32, the sum of the values. Every
// number depends on its own row only, in an order that threads, blocks and the instruction set leave alone.

#pragma once
#include "product.hpp"

namespace {

template <class T>
struct Attention {
    const T *q, *keys, *values;    // q [B, H, d] with a stride of rows; caches [n, K, s, d]
    const int32_t* tables;         // [B, M]
    const int64_t* lengths;        // [B]
    T* out;                        // [B, H, d], contiguous
    long num_rows, num_heads, num_kv_heads, head_dim, block_size, table_stride, stride_q, window;
    float scale;
};

// The sums of 8 vectors of 8, each by the tree of `sum`.
inline __m256 sums_of(__m256 r[8]) {
    __m256 s[4];
    turned(r);
    for (int i = 0; i < 4; i++)  // numbers i and i + 4 of each
        s[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20) + _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
inline __m256 folded(v16 a) {
#if LANES == 16
    return _mm512_castps512_ps256(a.part[0]) + _mm512_extractf32x8_ps(a.part[0], 1);
#else
    return a.part[0] + a.part[1];
#endif
}
template <class T>
inline v16 dot(const float* q, const T* key, long head_dim) {
    v16 a = every16(0.0f);
    for (long i = 0; i < head_dim; i += 16) a = fma(load16(q + i), load16(key + i), a);
    return a;
}

// scores[tokens] = q . keys[tokens][d]
template <class T>
void scores_of(const float* q, const T* keys, long tokens, long head_dim, float* scores) {
    long t = 0;
    for (; t + 8 <= tokens; t += 8) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) r[i] = folded(dot(q, keys + (t + i) * head_dim, head_dim));
        _mm256_storeu_ps(scores + t, sums_of(r));
    }
    for (; t < tokens; t++) scores[t] = sum(dot(q, keys + t * head_dim, head_dim));
}

// out[d] += sum over tokens of weights[token] values[token][d]
template <class T>
void add_values(const float* weights, const T* values, long tokens, long head_dim, float* out) {
    long first = 0;
    for (; first + 4 * LANES <= head_dim; first += 4 * LANES) {
        vec a = load(out + first), b = load(out + first + LANES), c = load(out + first + 2 * LANES),
            d = load(out + first + 3 * LANES);
        for (long t = 0; t < tokens; t++) {
            const T* value = values + t * head_dim + first;
            vec weight = every(weights[t]);
            a = fma(weight, load(value), a);
            b = fma(weight, load(value + LANES), b);
            c = fma(weight, load(value + 2 * LANES), c);
            d = fma(weight, load(value + 3 * LANES), d);
        }
        store(out + first, a), store(out + first + LANES, b), store(out + first + 2 * LANES, c);
        store(out + first + 3 * LANES, d);
    }
    for (; first < head_dim; first += LANES) {
        vec a = load(out + first);
        for (long t = 0; t < tokens; t++) a = fma(every(weights[t]), load(values + t * head_dim + first), a);
        store(out + first, a);
    }
}

template <class T>
void attend(const Attention<T>& p, long row, long head, float* q, float* out, float* scores, long width) {
    const long TILE = 64, d = p.head_dim, group = p.num_heads / p.num_kv_heads, s = p.block_size;
    const long length = p.lengths[row], start = p.window > 0 && length > p.window ? length - p.window : 0;
    const int32_t* table = p.tables + row * p.table_stride;
    T* to = p.out + (row * p.num_heads + head * group) * d;
    for (long i = 0; i < group * d; i++) {
        q[i] = wide(p.q[row * p.stride_q + head * group * d + i]);
        out[i] = 0.0f;
    }
    for (long t = start, n; t < length; t += n) {
        n = s - t % s < length - t ? s - t % s : length - t;
        n = n < TILE ? n : TILE;
        const T* keys = p.keys + ((table[t / s] * p.num_kv_heads + head) * s + t % s) * d;
        for (long g = 0; g < group; g++) scores_of(q + g * d, keys, n, d, scores + g * width + t - start);
    }
    float totals[group];
    for (long g = 0; g < group; g++) {
        float *mine = scores + g * width, most = -__builtin_inff();
        long count = length - start, whole = (count + 15) / 16 * 16;
        for (long t = count; t < whole; t++) mine[t] = -__builtin_inff();
        v16 high = every16(most), total = every16(0.0f), scale = every16(p.scale);
        for (long t = 0; t < whole; t += 16) {
            v16 x = load16(mine + t) * scale;
            store16(mine + t, x);
            high = larger(x, high);
        }
        most = largest(high);
        for (long t = 0; t < whole; t += 16) {
            v16 x = exp16(load16(mine + t) - every16(most));
            store16(mine + t, x);
            total = total + x;
        }
        totals[g] = sum(total);
    }
    for (long t = start, n; t < length; t += n) {
        n = s - t % s < length - t ? s - t % s : length - t;
        n = n < TILE ? n : TILE;
        const T* values = p.values + ((table[t / s] * p.num_kv_heads + head) * s + t % s) * d;
        for (long g = 0; g < group; g++) add_values(scores + g * width + t - start, values, n, d, out + g * d);
    }
    for (long g = 0; g < group; g++)
        for (long i = 0; i < d; i++) put(to + g * d + i, length ? out[g * d + i] / totals[g] : 0.0f);
}

template <class T>
bool attention(const Attention<T>& p) {
    long longest = 1, group = p.num_heads / p.num_kv_heads, tokens = 0, num_threads = omp_get_max_threads();
    for (long row = 0; row < p.num_rows; row++) {
        if (p.lengths[row] > longest) longest = p.lengths[row];
        tokens += p.lengths[row];
    }
    if (tokens * p.num_heads * p.head_dim <= 65536) num_threads = 1;
    long width = (longest + 15) / 16 * 16, own = whole_lines(group * (width + 2 * p.head_dim) * 4);
    Scratch scratch(num_threads * own);
    if (!scratch.at) return false;
#pragma omp parallel num_threads(num_threads)
    {
        float* scores = (float*)(scratch.at + omp_get_thread_num() * own);
        float *q = scores + group * width, *out = q + group * p.head_dim;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < p.num_rows * p.num_kv_heads; task++)
            attend(p, task / p.num_kv_heads, task % p.num_kv_heads, q, out, scores, width);
    }
    return true;
}

}  // namespace
