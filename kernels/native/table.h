// What module.cpp calls: the operations for float32 and bfloat16 of one instruction set.

#pragma once
#include <stdint.h>

typedef bool (*Operation)(const int64_t* numbers, double number);  // whether there was memory enough

struct Operations {
    Operation pack, product, products, attention, norm, turn, write, gated, masses;
};
struct Set {
    long columns;  // of a panel of packed weights
    Operations of[2];
};

extern "C" const Set avx2, avx512;
