// The Python module: each function takes the bytes of a number (4: float32, 2: bfloat16), then what operations.hpp
// lists for it (addresses and sizes), then a number if it has one. It runs without Python's lock. kernels/cpu.py calls it
// and checks shapes.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "table.h"

static const Set* set = 0;

static PyObject* call(Operation Operations::*which, PyObject* const* args, Py_ssize_t count, int num_numbers, bool has_scale) {
    int64_t numbers[16];
    if (!set || count != 1 + num_numbers + has_scale) {
        PyErr_SetString(PyExc_TypeError, set ? "wrong number of arguments" : "no instruction set was chosen");
        return 0;
    }
    long bytes = PyLong_AsLong(args[0]);
    for (int i = 0; i < num_numbers; i++) numbers[i] = PyLong_AsLongLong(args[1 + i]);
    double scale = has_scale ? PyFloat_AsDouble(args[1 + num_numbers]) : 0.0;
    if (PyErr_Occurred()) return 0;
    Operation operation = set->of[bytes == 2].*which;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = operation(numbers, scale);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define FUNCTION(name, num_numbers, has_scale)                                          \
    static PyObject* name##_(PyObject*, PyObject* const* args, Py_ssize_t count) {     \
        return call(&Operations::name, args, count, num_numbers, has_scale);           \
    }
FUNCTION(pack, 4, false)
FUNCTION(product, 10, false)
FUNCTION(products, 8, false)
FUNCTION(attention, 14, true)
FUNCTION(norm, 11, true)
FUNCTION(turn, 9, false)
FUNCTION(write, 9, false)
FUNCTION(gated, 7, false)
FUNCTION(masses, 11, false)

static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

// use(name) -> columns of a panel of packed weights, 0 if this processor lacks the instructions
static PyObject* use(PyObject*, PyObject* name) {
    const char* wanted = PyUnicode_AsUTF8(name);
    if (!wanted) return 0;
    if (!strcmp(wanted, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) set = &avx2;
    else if (!strcmp(wanted, "avx512") && has_avx512()) set = &avx512;
    else return PyLong_FromLong(0);
    return PyLong_FromLong(set->columns);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name##_, METH_FASTCALL, 0}
static PyMethodDef methods[] = {METHOD(pack), METHOD(product), METHOD(products), METHOD(attention), METHOD(norm), METHOD(turn),
                                METHOD(write), METHOD(gated), METHOD(masses), {"use", use, METH_O, 0}, {0, 0, 0, 0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", 0, -1, methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
