// The facts that a kernel carries for the host: tables of constants in its cubin, which no device code reads. The build
// copies the tables into the manifest (codegen/kernel_info.py), so that the host repeats no figure of the device code.
//   sage_facts   figures by name, such as {"shared_bytes", 213088}
//   sage_fields  the struct that the kernel takes by value, and its fields
#pragma once

#include "sage/types.cuh"

// NVRTC has no <stddef.h>; its front end expands offsetof to __INTADDR__.
#ifdef __CUDACC_RTC__
#define SAGE_OFFSET(type, member) __INTADDR__(&((type*)0)->member)
#else
#define SAGE_OFFSET(type, member) __builtin_offsetof(type, member)
#endif

namespace sage {

struct Fact {
  char name[24];
  double value;  // holds every i32 and every float exactly
};

struct Field {
  char name[24];
  i32 type;    // one character: Q address, i i32, f float, T sage::Tensor, D sage::FastDivmod; S the struct
  i32 offset;  // in bytes; for type S, the size of the struct
};

template <class Row, i32 kRows>
struct Table {
  Row rows[kRows];
};

template <class... Rows>
constexpr Table<Fact, sizeof...(Rows)> facts(Rows... rows) {
  return {{rows...}};
}

template <class... Rows>
constexpr Table<Field, sizeof...(Rows)> fields(Rows... rows) {
  return {{rows...}};
}

// The character of a field's type; Tensor and FastDivmod add theirs.
template <class T>
struct FieldType;
template <class T>
struct FieldType<T*> {
  static constexpr i32 kCode = 'Q';
};
template <>
struct FieldType<i32> {
  static constexpr i32 kCode = 'i';
};
template <>
struct FieldType<Dtype> {
  static constexpr i32 kCode = 'i';
};
template <>
struct FieldType<float> {
  static constexpr i32 kCode = 'f';
};

// Rows for fields_of(): the struct itself, and a member of the struct, which the function names `Params`.
#define SAGE_STRUCT(name) \
  Field { #name, 'S', sizeof(name) }
#define SAGE_FIELD(member) \
  Field { #member, FieldType<decltype(Params::member)>::kCode, static_cast<i32>(SAGE_OFFSET(Params, member)) }

}  // namespace sage

// Defines both tables of a translation unit: for its kernel, and for the struct that the kernel takes.
#define SAGE_KERNEL_INFO(Kernel, Params) \
  extern "C" __device__ constexpr auto sage_facts = Kernel::facts(); \
  extern "C" __device__ constexpr auto sage_fields = sage::fields_of(static_cast<const sage::Params*>(nullptr))
