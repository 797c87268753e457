// Device memory: the buffers that a launch may touch, and for each byte whether it may be written and was written.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "report.h"
#include "types.h"

namespace sim {

class Block;

class GlobalMemory {
 public:
  enum State : u8 { kInside = 1, kWritten = 2, kWritable = 4 };  // bits; a byte without kInside belongs to nobody

  void clear() { buffers_.clear(), last_ = nullptr; }
  void add(std::string name, u8* base, u64 bytes, const u8* state);
  void get_states(u32 index, u8* states) const {
    std::copy(buffers_[index].state.begin(), buffers_[index].state.end(), states);
  }

  // Whether a buffer has the bytes. If so, checks the access; a write marks its bytes as written. An access that a
  // buffer does not allow stops the block.
  bool read(Block& block, const void* address, u32 bytes, const Where& where);
  bool write(Block& block, const void* address, u32 bytes, const Where& where);

  std::string nearest(const void* address) const;  // for reports

 private:
  struct Buffer {
    std::string name;
    u8* base;
    std::vector<u8> state;
  };

  Buffer* find(const void* address, u32 bytes);
  static long long offset_in(const Buffer& buffer, const void* address) {
    return static_cast<const u8*>(address) - buffer.base;
  }
  // The states of the bytes. Stops the block unless all of them have the needed bits.
  static u8* require(Block& block, const char* access, u8 needed, Buffer& buffer, const void* address, u32 bytes,
                     const Where& where);

  std::vector<Buffer> buffers_;
  Buffer* last_ = nullptr;
};

}  // namespace sim
