// The operations with AVX2.
#pragma GCC target("avx2,fma")
#define LANES 8
#include "operations.hpp"
TABLE(avx2)
