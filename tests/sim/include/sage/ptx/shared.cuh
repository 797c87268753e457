// Meanings of templates/include/sage/ptx/shared.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline u32 shared_address(const void* pointer, sim::Site site = sim::Site::here()) {
  return __cvta_generic_to_shared(pointer, site);
}

inline float load_shared_f32(u32 shared, sim::Site site = sim::Site::here()) {
  float x;
  sim::load_shared("ld.shared.f32", &x, shared, sizeof x, site);
  return x;
}

inline u32 load_shared_u32(u32 shared, sim::Site site = sim::Site::here()) {
  u32 x;
  sim::load_shared("ld.shared.b32", &x, shared, sizeof x, site);
  return x;
}

inline u32 load_shared_u16(u32 shared, sim::Site site = sim::Site::here()) {
  u16 x;
  sim::load_shared("ld.shared.b16", &x, shared, sizeof x, site);
  return x;
}

inline void store_shared_u32(u32 shared, u32 x, sim::Site site = sim::Site::here()) {
  sim::store_shared("st.shared.b32", shared, &x, sizeof x, site);
}

inline void store_shared_u16(u32 shared, u32 x, sim::Site site = sim::Site::here()) {
  const u16 half = static_cast<u16>(x);
  sim::store_shared("st.shared.b16", shared, &half, sizeof half, site);
}

inline void store_shared_u8(u32 shared, u32 x, sim::Site site = sim::Site::here()) {
  const u8 byte = static_cast<u8>(x);
  sim::store_shared("st.shared.u8", shared, &byte, sizeof byte, site);
}

struct F32x2 {
  float x, y;
};

inline F32x2 load_shared_f32x2(u32 shared, sim::Site site = sim::Site::here()) {
  F32x2 pair;
  sim::load_shared("ld.shared.v2.f32", &pair, shared, sizeof pair, site);
  return pair;
}

struct alignas(16) U32x4 {
  u32 x, y, z, w;
};

inline U32x4 load_shared_u32x4(u32 shared, sim::Site site = sim::Site::here()) {
  U32x4 four;
  sim::load_shared("ld.shared.v4.b32", &four, shared, sizeof four, site);
  return four;
}

}  // namespace sage::ptx
