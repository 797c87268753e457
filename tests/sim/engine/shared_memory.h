// A block's shared memory, and a record for each byte: whether it was written, its last writer, the readers since, and
// whether an asynchronous copy into it is in flight. The four bytes of a word share a record until an access takes a
// part of the word: nearly all accesses take whole words.
//
// Shared addresses: dynamic memory begins at 1024, as on chips, where the system takes the first kilobyte. Static
// memory, which is the kernel's thread-local storage, lies far above.
#pragma once

#include <cstring>
#include <vector>

#include "image.h"
#include "order.h"
#include "report.h"
#include "types.h"

namespace sim {

class Block;

class SharedMemory {
 public:
  static constexpr u32 kNone = 0;  // no shared address

  SharedMemory(Block& block, const Order& order) : block_(block), order_(order) {}

  // Nothing is written, everything holds NaNs.
  void start(u32 dynamic_bytes, const Image& kernel);

  u32 address_of(const void* pointer) const;  // kNone where it points elsewhere
  u8* pointer_to(u32 address) const;

  // Each checks that the bytes exist and that the access is ordered after other accesses. An access outside the block's
  // memory stops the block.
  void read(u32 address, u32 bytes, const Where& where) {
    if (!read_alike(address, bytes, where.thread)) read_any(address, bytes, where);
  }
  void write(u32 address, u32 bytes, const Where& where);
  // An atomic access: atomics need no order among themselves.
  void update(u32 address, u32 bytes, const Where& where);
  void begin_copy(u32 address, u32 bytes, const Where& where);
  void end_copy(u32 address, u32 bytes, u32 thread);

  // Checks that a proxy fence followed the ordinary stores to the bytes, of the thread that stored, or of that which
  // starts the access, behind what orders the two.
  void check_fenced(u32 address, u32 bytes, const Where& where);

  // Reads of an instruction of the async proxy, which runs while its thread goes on: until the end no thread may write
  // the bytes.
  void begin_read(u32 address, u32 bytes, const Where& where);
  void end_read(u32 address, u32 bytes, u32 agent);

 private:
  enum State : u8 { kUnwritten, kWritten, kPending, kSplit };  // kSplit: of a word whose bytes have their own records

  struct alignas(16) Record {
    Epoch writer;  // where written or pending
    u32 readers;   // since then
    u32 unfenced;  // fences of the proxy that its writer had executed; kFenced where none is needed
    u16 held;      // instructions that read it and still run
    bool atomic;   // whether the writer wrote by an atomic; it is then the last of several
    State state;
  };
  static_assert(sizeof(Record) == 16);  // without padding: read_alike() compares all bytes of it
  static constexpr u32 kFenced = 0;
  static constexpr u32 kWord = 4;
  static constexpr u32 kDynamicBase = 1024, kStaticBase = 0x40000;
  static constexpr u32 kMostStaticBytes = 0x20000;  // of all entry points of a library together
  static constexpr u32 kEnd = kStaticBase + kMostStaticBytes;

  // The records of an access, in the order of addresses, each of them of `unit` bytes.
  struct Records {
    Record *first, *last;
    u32 address, unit;

    Record* begin() const { return first; }
    Record* end() const { return last; }
    u32 address_of(const Record& record) const { return address + static_cast<u32>(&record - first) * unit; }
  };

  // Reads whole words that were written alike and are read in order: nearly all accesses. False where they are not.
  bool read_alike(u32 address, u32 bytes, u32 thread);
  void read_any(u32 address, u32 bytes, const Where& where);

  Records records(u32 address, u32 bytes);
  void forget(u32 address, u32 bytes);
  bool holds(u32 address, u32 bytes) const {
    return (address >= kDynamicBase && address + bytes <= kDynamicBase + dynamic_bytes_) ||
           (address >= kStaticBase && address + bytes <= kStaticBase + static_bytes_);
  }
  void require(const char* access, u32 address, u32 bytes, const Where& where);
  bool check_written(u32 address, u32 bytes, const Where& where);
  bool check_ordered(u32 address, u32 bytes, const Where& where);
  void add_reader(u32 address, u32 bytes, u32 reader);
  void claim(u32 address, u32 bytes, const Where& where, State state, u32 unfenced, bool atomic = false);
  void race(const char* access, u32 address, const char* earlier, u32 thread, const Where& where);

  Block& block_;
  const Order& order_;
  u8* dynamic_ = nullptr;
  u8* static_ = nullptr;
  u32 dynamic_bytes_ = 0, static_bytes_ = 0;
  ReaderSets readers_;

  // By address. They outlive a launch: to clear all of them would take longer than most launches run.
  static Record words_[kEnd / kWord], bytes_[kEnd];
};

inline bool SharedMemory::read_alike(u32 address, u32 bytes, u32 thread) {
  if ((address | bytes) % kWord != 0 || !holds(address, bytes)) return false;
  Record* const first = &words_[address / kWord];
  Record* const last = first + bytes / kWord;
  bool alike = first->state == kWritten;
  for (const Record* record = first + 1; record < last; ++record) {
    alike &= std::memcmp(record, first, sizeof(Record)) == 0;
  }
  const Epoch now = order_.now(thread);
  if (!alike || (first->writer != now && !order_.before(first->writer, thread))) return false;
  const u32 after = readers_.with(first->readers, now, order_);
  if (after == first->readers) return true;
  for (Record* record = first; record < last; ++record) record->readers = after;
  return true;
}

}  // namespace sim
