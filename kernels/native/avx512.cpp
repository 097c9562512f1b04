// The operations with AVX-512.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LANES 16
#include "operations.hpp"
TABLE(avx512)
