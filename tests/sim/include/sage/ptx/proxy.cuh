// Meanings of templates/include/sage/ptx/proxy.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void fence_proxy_async() { sim::fence_proxy_async(); }
inline void fence_proxy_async_all() { sim::fence_proxy_async(); }

}  // namespace sage::ptx
