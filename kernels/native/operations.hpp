// The operations of one instruction set, as a table: each takes its pointers and sizes in the order of its struct.

#pragma once
#include "attention.hpp"
#include "product.hpp"
#include "rows.hpp"

#include "table.h"

namespace {

template <class T>
struct Calls {
    static const T* at(int64_t address) { return (const T*)address; }
    static T* to(int64_t address) { return (T*)address; }

    static bool pack(const int64_t* a, double) { ::pack(at(a[0]), a[1], a[2], to(a[3])); return true; }
    static bool product(const int64_t* a, double) {
        return ::product(Product<T>{at(a[0]), at(a[1]), at(a[2]), to(a[3]), a[4], a[5], a[6], a[7], a[8], a[9] != 0});
    }
    static bool products(const int64_t* a, double) {
        return ::products(Products<T>{at(a[0]), (const int64_t*)a[1], (const int64_t*)a[2], to(a[3]), a[4], a[5], a[6], a[7]});
    }
    static bool attention(const int64_t* a, double scale) {
        return ::attention(Attention<T>{at(a[0]), at(a[1]), at(a[2]), (const int32_t*)a[3], (const int64_t*)a[4], to(a[5]), a[6],
                                 a[7], a[8], a[9], a[10], a[11], a[12], a[13], (float)scale});
    }
    static bool norm(const int64_t* a, double eps) {
        ::norm(Norm<T>{at(a[0]), at(a[1]), at(a[2]), to(a[3]), to(a[4]), a[5], a[6], a[7], a[8], a[9], a[10], (float)eps});
        return true;
    }
    static bool turn(const int64_t* a, double) {
        ::turn(Turn<T>{at(a[0]), at(a[1]), at(a[2]), to(a[3]), a[4], a[5], a[6], a[7], a[8]});
        return true;
    }
    static bool write(const int64_t* a, double) {
        ::write(Write<T>{at(a[0]), to(a[1]), (const int64_t*)a[2], a[3], a[4], a[5], a[6], a[7], a[8]});
        return true;
    }
    static bool gated(const int64_t* a, double) {
        ::gated(Gate<T>{at(a[0]), at(a[1]), to(a[2]), a[3], a[4], a[5], a[6]});
        return true;
    }
    static bool masses(const int64_t* a, double) {
        ::masses(Masses<T>{at(a[0]), (const float*)a[1], (const float*)a[2], (float*)a[3], (double*)a[4], a[5], a[6], a[7],
                           a[8], a[9], a[10]});
        return true;
    }
    static constexpr Operations table = {pack, product, products, attention, norm, turn, write, gated, masses};
};

}  // namespace

#define TABLE(name) extern "C" const Set name = {COLUMNS, {Calls<float>::table, Calls<bf16>::table}};
