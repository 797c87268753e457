#include "global_memory.h"

#include "block.h"

namespace sim {

void GlobalMemory::add(std::string name, u8* base, u64 bytes, const u8* state) {
  buffers_.push_back({std::move(name), base, std::vector<u8>(state, state + bytes)});
  last_ = &buffers_.back();
}

GlobalMemory::Buffer* GlobalMemory::find(const void* address, u32 bytes) {
  const u8* p = static_cast<const u8*>(address);
  const auto overlaps = [&](const Buffer& buffer) {
    return p + bytes > buffer.base && p < buffer.base + buffer.state.size();
  };
  if (last_ && overlaps(*last_)) return last_;
  for (Buffer& buffer : buffers_) {
    if (overlaps(buffer)) return last_ = &buffer;
  }
  return nullptr;
}

bool GlobalMemory::read(Block& block, const void* address, u32 bytes, const Where& where) {
  Buffer* buffer = find(address, bytes);
  if (!buffer) return false;
  const u8* state = require(block, "read", kInside, *buffer, address, bytes, where);
  for (u32 i = 0; i < bytes; ++i) {
    if (state[i] & kWritten) continue;
    block.report("read of memory that nothing wrote", where,
                 text("%u bytes at byte %lld of %s", bytes, offset_in(*buffer, address), buffer->name.c_str()));
    break;
  }
  return true;
}

bool GlobalMemory::write(Block& block, const void* address, u32 bytes, const Where& where) {
  Buffer* buffer = find(address, bytes);
  if (!buffer) return false;
  u8* state = require(block, "write", kInside | kWritable, *buffer, address, bytes, where);
  for (u32 i = 0; i < bytes; ++i) state[i] |= kWritten;
  return true;
}

u8* GlobalMemory::require(Block& block, const char* access, u8 needed, Buffer& buffer, const void* address, u32 bytes,
                          const Where& where) {
  const long long offset = offset_in(buffer, address);
  bool allowed = offset >= 0 && static_cast<u64>(offset) + bytes <= buffer.state.size();
  for (u32 i = 0; i < bytes && allowed; ++i) allowed = (buffer.state[offset + i] & needed) == needed;
  if (!allowed) {
    block.report("access outside an allocation", where,
                 text("%s of %u bytes at byte %lld of %s, which has %llu, or gaps there", access, bytes, offset,
                      buffer.name.c_str(), static_cast<unsigned long long>(buffer.state.size())));
    block.stop();
  }
  return &buffer.state[offset];
}

std::string GlobalMemory::nearest(const void* address) const {
  const u8* p = static_cast<const u8*>(address);
  const Buffer* best = nullptr;
  u64 distance = 0;
  for (const Buffer& buffer : buffers_) {
    const u8* end = buffer.base + buffer.state.size();
    const u64 d = p < buffer.base ? buffer.base - p : p - end;
    if (!best || d < distance) best = &buffer, distance = d;
  }
  if (!best || distance > 1 << 20) return text("address %p, far from every buffer", address);
  return text("byte %lld of %s, which has %llu", static_cast<long long>(p - best->base), best->name.c_str(),
              static_cast<unsigned long long>(best->state.size()));
}

}  // namespace sim
