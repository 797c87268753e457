#include "image.h"

#include <link.h>

#include <algorithm>

namespace sim {

namespace {

Image image_of(const dl_phdr_info& module) {
  const u8* base = reinterpret_cast<const u8*>(module.dlpi_addr);
  Image image{base, base, base, static_cast<u8*>(module.dlpi_tls_data), 0};
  for (int i = 0; i < module.dlpi_phnum; ++i) {
    const auto& segment = module.dlpi_phdr[i];
    if (segment.p_type == PT_LOAD) image.end = std::max(image.end, base + segment.p_vaddr + segment.p_memsz);
    if (segment.p_type == PT_TLS) image.thread_local_bytes = static_cast<u32>(segment.p_memsz);
  }
  return image;
}

}  // namespace

Image Image::of(const void* code) {
  struct Search {
    const void* code;
    Image found;
  } search{code, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void* data) {
        Search& search = *static_cast<Search*>(data);
        search.found = image_of(*module);
        return static_cast<int>(search.found.holds(search.code));  // ends the search
      },
      &search);
  return search.found;
}

}  // namespace sim
