// The steps between products, row by row: norms, rotations, cache writes, SwiGLU, the masses of a vocabulary's blocks.

#pragma once
#include "vector.hpp"

#include <string.h>

namespace {

constexpr long FEW = 1 << 15;  // numbers for which starting threads takes longer than one of them

template <class T>
inline v16 load_some(const T* p, long count, float rest) {
    if (count >= 16) return load16(p);
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = i < count ? wide(p[i]) : rest;
    return load16(x);
}
template <class T>
inline void store_some(T* p, v16 a, long count) {
    if (count >= 16) return store16(p, a);
    float x[16];
    store16(x, a);
    for (int i = 0; i < count; i++) put(p + i, x[i]);
}
inline v16 rounded_to(float*, v16 a) { return a; }
inline v16 rounded_to(bf16*, v16 a) {
    bf16 x[16];
    store16(x, a);
    return load16(x);
}

// y = s / sqrt(mean(s^2) + eps) * weight, s = x + residual. x [T, H, D] with strides; y and s contiguous.
template <class T>
struct Norm {
    const T *x, *residual, *weight;
    T *y, *s;
    long num_tokens, num_heads, size, stride_token, stride_head, stride_residual;
    float eps;
};
template <class T>
void norm(const Norm<T>& p) {
#pragma omp parallel for schedule(static) if (p.num_tokens * p.num_heads * p.size > FEW)
    for (long row = 0; row < p.num_tokens * p.num_heads; row++) {
        long token = row / p.num_heads, head = row % p.num_heads;
        const T* x = p.x + token * p.stride_token + head * p.stride_head;
        T *y = p.y + row * p.size, *s = p.s + row * p.size;
        v16 squares = every16(0.0f);
        for (long i = 0; i < p.size; i += 16) {
            v16 a = load_some(x + i, p.size - i, 0.0f);
            if (p.residual) {
                a = rounded_to(y, a + load_some(p.residual + token * p.stride_residual + i, p.size - i, 0.0f));
                store_some(s + i, a, p.size - i);
            }
            squares = squares + a * a;
        }
        if (p.residual) x = s;
        v16 scale = every16(1.0f / __builtin_sqrtf(sum(squares) / (float)p.size + p.eps));
        for (long i = 0; i < p.size; i += 16) {
            v16 weight = load_some(p.weight + i, p.size - i, 0.0f);
            store_some(y + i, load_some(x + i, p.size - i, 0.0f) * scale * weight, p.size - i);
        }
    }
}

// y = x turned by its position; x [T, H, d] with strides, cos and sin [T, d / 2]. Products are rounded before the sum.
template <class T>
struct Turn {
    const T *x, *cos, *sin;
    T* y;
    long num_tokens, num_heads, head_dim, stride_token, stride_head;
};
template <class T>
void turn(const Turn<T>& p) {
    long half = p.head_dim / 2;
#pragma omp parallel for schedule(static) if (p.num_tokens * p.num_heads * p.head_dim > FEW)
    for (long row = 0; row < p.num_tokens * p.num_heads; row++) {
        long token = row / p.num_heads, head = row % p.num_heads;
        const T *a = p.x + token * p.stride_token + head * p.stride_head, *b = a + half;
        const T *cos = p.cos + token * half, *sin = p.sin + token * half;
        T* y = p.y + row * p.head_dim;
        for (long i = 0; i < half; i += 16) {
            v16 x = load_some(a + i, half - i, 0.0f), z = load_some(b + i, half - i, 0.0f);
            v16 c = load_some(cos + i, half - i, 0.0f), s = load_some(sin + i, half - i, 0.0f);
            store_some(y + i, rounded_to(y, x * c) - rounded_to(y, z * s), half - i);
            store_some(y + half + i, rounded_to(y, z * c) + rounded_to(y, x * s), half - i);
        }
    }
}

// cache[slot / s, k, slot % s] = new[t, k] for slots that are not negative; new [T, K, d] with strides.
template <class T>
struct Write {
    const T* x;
    T* cache;
    const int64_t* slots;
    long num_tokens, num_heads, head_dim, block_size, stride_token, stride_head;
};
template <class T>
void write(const Write<T>& p) {
    for (long token = 0; token < p.num_tokens; token++) {
        if (p.slots[token] < 0) continue;
        long block = p.slots[token] / p.block_size, offset = p.slots[token] % p.block_size;
        for (long head = 0; head < p.num_heads; head++)
            memcpy(p.cache + ((block * p.num_heads + head) * p.block_size + offset) * p.head_dim,
                   p.x + token * p.stride_token + head * p.stride_head, p.head_dim * sizeof(T));
    }
}

// y = silu(gate) up, silu rounded before the product.
template <class T>
struct Gate {
    const T *gate, *up;
    T* y;
    long num_rows, size, stride_gate, stride_up;
};
template <class T>
void gated(const Gate<T>& p) {
    const v16 zero = every16(0.0f), one = every16(1.0f);
#pragma omp parallel for schedule(static) if (p.num_rows * p.size > FEW)
    for (long row = 0; row < p.num_rows; row++) {
        T* y = p.y + row * p.size;
        for (long i = 0; i < p.size; i += 16) {
            v16 x = load_some(p.gate + row * p.stride_gate + i, p.size - i, 0.0f);
            v16 e = exp16(zero - larger(x, zero - x));            // e^-|x|
            v16 top = larger(x, zero) - larger(zero - x, zero) * e;  // x, or x e^x if x is negative
            v16 up = load_some(p.up + row * p.stride_up + i, p.size - i, 0.0f);
            store_some(y + i, rounded_to(y, top / (one + e)) * up, p.size - i);
        }
    }
}

// max z and the mass of each block relative to it, z = logits / temperature; only tokens with z >= least count.
template <class T>
struct Masses {
    const T* logits;
    const float *temperature, *least;  // least: 0 for all tokens
    float* high;
    double* masses;
    long num_rows, width, stride, offset, block, num_blocks;
};
template <class T>
void masses(const Masses<T>& p) {
    const float inf = __builtin_inff();
#pragma omp parallel for schedule(static) if (p.num_rows * p.width > FEW)
    for (long row = 0; row < p.num_rows; row++) {
        const T* x = p.logits + row * p.stride;
        v16 temperature = every16(p.temperature[row]), high = every16(-inf);
        for (long i = 0; i < p.width; i += 16) {
            v16 z = load_some(x + i, p.width - i, -inf) / temperature;
            high = larger(z, high);  // without NaN, which the masses keep
        }
        float most = largest(high);
        p.high[row] = most;
        v16 shift = every16(most > -3.4028234e38f ? most : -3.4028234e38f);
        for (long block = 0; block < p.num_blocks; block++) {
            long from = block * p.block - p.offset, to = from + p.block;
            from = from > 0 ? from : 0, to = to < p.width ? to : p.width;
            v16 total = every16(0.0f);
            for (long i = from; i < to; i += 16) {
                v16 z = load_some(x + i, to - i, -inf) / temperature, e = exp16(z - shift);
                if (p.least) {
                    float all[16], mine[16];
                    store16(all, z), store16(mine, e);
                    for (int j = 0; j < 16; j++) mine[j] = all[j] < p.least[row] ? 0.0f : mine[j];
                    e = load16(mine);
                }
                total = total + e;
            }
            p.masses[row * p.num_blocks + block] = sum(total);
        }
    }
}

}  // namespace
