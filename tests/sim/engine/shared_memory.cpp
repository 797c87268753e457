#include "shared_memory.h"

#include <algorithm>
#include <cstring>

#include "block.h"

// The memory of a kernel's `extern __shared__ ... shared[]`, as large as the largest chip's.
constexpr sim::u32 kMostDynamicBytes = 232448;
alignas(1024) thread_local unsigned char shared[kMostDynamicBytes];

namespace sim {

namespace {

constexpr u32 kDynamicBase = 1024, kStaticBase = 0x40000, kMostStaticBytes = 0x10000;
static_assert(kDynamicBase + kMostDynamicBytes <= kStaticBase);

}  // namespace

void SharedMemory::start(u32 dynamic_bytes, const Image& kernel) {
  dynamic_ = shared, dynamic_bytes_ = dynamic_bytes;
  static_ = kernel.thread_local_begin, static_bytes_ = kernel.thread_local_bytes;
  bytes_.resize(kStaticBase + kMostStaticBytes);
  forget(kDynamicBase, dynamic_bytes_);
  forget(kStaticBase, static_bytes_);
  readers_.start();
}

// Clears the block's own addresses alone: nothing beyond them is ever looked up, and to clear all would take longer
// than most blocks run.
void SharedMemory::forget(u32 address, u32 bytes) {
  std::memset(pointer_to(address), 0xff, bytes);
  std::fill_n(bytes_.begin() + address, bytes, Byte{});
}

u32 SharedMemory::address_of(const void* pointer) const {
  const u8* p = static_cast<const u8*>(pointer);
  if (static_cast<u64>(p - dynamic_) < kMostDynamicBytes) return kDynamicBase + static_cast<u32>(p - dynamic_);
  if (static_cast<u64>(p - static_) < static_bytes_) return kStaticBase + static_cast<u32>(p - static_);
  return kNone;
}

u8* SharedMemory::pointer_to(u32 address) const {
  return address < kStaticBase ? dynamic_ + (address - kDynamicBase) : static_ + (address - kStaticBase);
}

void SharedMemory::require(const char* access, u32 address, u32 bytes, const Where& where) {
  const bool in_dynamic = address >= kDynamicBase && address + bytes <= kDynamicBase + dynamic_bytes_;
  const bool in_static = address >= kStaticBase && address + bytes <= kStaticBase + static_bytes_;
  if (in_dynamic || in_static) return;
  block_.report("access outside an allocation", where,
                text("%s of %u bytes at byte %d of the %u bytes of dynamic shared memory", access, bytes,
                     static_cast<i32>(address - kDynamicBase), dynamic_bytes_));
  block_.stop();
}

// Whether the bytes of an access have one record, as nearly always.
bool SharedMemory::alike(u32 address, u32 bytes) const {
  const Byte& first = bytes_[address];
  bool same = true;
  for (u32 i = address + 1; i < address + bytes; ++i) same &= std::memcmp(&bytes_[i], &first, sizeof(Byte)) == 0;
  return same;
}

void SharedMemory::read(u32 address, u32 bytes, const Where& where) {
  require("read", address, bytes, where);
  const Epoch now = block_.order.now(where.thread);
  const Byte first = bytes_[address];
  if (first.state == kWritten && (first.writer == now || block_.order.before(first.writer, where.thread)) &&
      alike(address, bytes)) {
    const u32 after = readers_.with(first.readers, now, block_.order);
    if (after == first.readers) return;
    for (u32 i = address; i < address + bytes; ++i) bytes_[i].readers = after;
    return;
  }
  // One pass finds that a read is right, as nearly all are. A second pass finds the fault of a wrong one.
  Epoch ordered = now;  // a writer that was found to be ordered before
  u32 before = bytes_[address].readers;
  u32 after = readers_.with(before, now, block_.order);
  for (u32 i = address; i < address + bytes; ++i) {
    Byte& byte = bytes_[i];
    if (bytes_[i].state != kWritten || (byte.writer != ordered && !block_.order.before(byte.writer, where.thread))) {
      check_written(address, bytes, where) && check_ordered(address, bytes, where);
      return;
    }
    ordered = byte.writer;
    if (byte.readers != before) before = byte.readers, after = readers_.with(before, now, block_.order);
    byte.readers = after;
  }
}

void SharedMemory::add_reader(u32 address, u32 bytes, u32 reader) {
  const Epoch now = block_.order.now(reader);
  u32 before = bytes_[address].readers;
  u32 after = readers_.with(before, now, block_.order);
  for (u32 i = address; i < address + bytes; ++i) {  // most bytes have the readers of those before them
    if (bytes_[i].readers != before) before = bytes_[i].readers, after = readers_.with(before, now, block_.order);
    bytes_[i].readers = after;
  }
}

bool SharedMemory::check_written(u32 address, u32 bytes, const Where& where) {
  for (u32 i = address; i < address + bytes; ++i) {
    if (bytes_[i].state == kWritten) continue;
    if (bytes_[i].state == kPending) {
      block_.report("asynchronous copy read before it was waited for", where,
                    text("%u bytes at shared address 0x%x, which %s copies to", bytes, address,
                         block_.name_of(thread_of(bytes_[i].writer)).c_str()));
    } else {
      block_.report("read of memory that nothing wrote", where,
                    text("%u bytes at shared address 0x%x", bytes, address));
    }
    return false;
  }
  return true;
}

bool SharedMemory::check_ordered(u32 address, u32 bytes, const Where& where) {
  Epoch ordered = block_.order.now(where.thread);  // the last writer that was found to be ordered before
  for (u32 i = address; i < address + bytes; ++i) {
    const Epoch writer = bytes_[i].writer;
    if (bytes_[i].state == kWritten && writer != ordered && !block_.order.before(writer, where.thread)) {
      race("read", i, "written", thread_of(writer), where);
      return false;
    }
    ordered = writer;
  }
  return true;
}

void SharedMemory::begin_read(u32 address, u32 bytes, const Where& where) {
  require("read", address, bytes, where);
  if (check_written(address, bytes, where) && check_ordered(address, bytes, where)) check_fenced(address, bytes, where);
  for (u32 i = address; i < address + bytes; ++i) ++bytes_[i].held;
}

void SharedMemory::check_fenced(u32 address, u32 bytes, const Where& where) {
  require("access of the async proxy", address, bytes, where);
  for (u32 i = address; i < address + bytes; ++i) {
    const Byte& byte = bytes_[i];
    if (byte.unfenced == kFenced || block_.proxy_fences(thread_of(byte.writer)) > byte.unfenced) continue;
    block_.report("access of the async proxy without fence.proxy.async", where,
                  text("shared address 0x%x, which %s stored to", i, block_.name_of(thread_of(byte.writer)).c_str()));
    return;
  }
}

void SharedMemory::end_read(u32 address, u32 bytes, u32 agent) {
  for (u32 i = address; i < address + bytes; ++i) --bytes_[i].held;
  add_reader(address, bytes, agent);
}

void SharedMemory::write(u32 address, u32 bytes, const Where& where) {
  require("write", address, bytes, where);
  claim(address, bytes, where, kWritten);
  for (u32 i = address; i < address + bytes; ++i) bytes_[i].unfenced = block_.proxy_fences(where.thread);
}

void SharedMemory::update(u32 address, u32 bytes, const Where& where) {
  require("atomic", address, bytes, where);
  check_written(address, bytes, where);
  claim(address, bytes, where, kWritten, true);
  for (u32 i = address; i < address + bytes; ++i) bytes_[i].unfenced = block_.proxy_fences(where.thread);
}

void SharedMemory::begin_copy(u32 address, u32 bytes, const Where& where) {
  require("asynchronous copy", address, bytes, where);
  claim(address, bytes, where, kPending);
}

void SharedMemory::end_copy(u32 address, u32 bytes, u32 thread) {
  for (u32 i = address; i < address + bytes; ++i) {
    bytes_[i].state = kWritten;
    bytes_[i].writer = block_.order.now(thread);
    bytes_[i].unfenced = block_.proxy_fences(thread);
  }
}

// The bytes take a new value: all writes and reads of the old value must be ordered before.
void SharedMemory::claim(u32 address, u32 bytes, const Where& where, State state, bool atomic) {
  const Epoch now = block_.order.now(where.thread);
  Epoch ordered = now;
  u32 ordered_readers = ReaderSets::kEmpty;
  bool faulty = false;  // one report an access
  for (u32 i = address; i < address + bytes; ++i) {
    Byte& byte = bytes_[i];
    if (!faulty && bytes_[i].state == kPending) {
      faulty = true;
      block_.report("buffer overwritten while an asynchronous copy into it is pending", where,
                    text("%u bytes at shared address 0x%x, which %s copies to", bytes, address,
                         block_.name_of(thread_of(byte.writer)).c_str()));
    }
    if (!faulty && byte.held > 0) {
      faulty = true;
      block_.report("buffer overwritten while a pending instruction reads it", where,
                    text("%u bytes at shared address 0x%x", bytes, address));
    }
    if (!faulty && bytes_[i].state == kWritten && !(atomic && byte.atomic) && byte.writer != ordered &&
        !block_.order.before(byte.writer, where.thread)) {
      faulty = true;
      race("write", i, "written", thread_of(byte.writer), where);
    }
    if (!faulty && byte.readers != ordered_readers && bytes_[i].state != kUnwritten) {
      for (const Epoch reader : readers_.members(byte.readers)) {
        if (faulty || block_.order.before(reader, where.thread)) continue;
        faulty = true;
        race("write", i, "read", thread_of(reader), where);
      }
      ordered_readers = byte.readers;
    }
    if (bytes_[i].state == kWritten) ordered = byte.writer;
    byte = {now, ReaderSets::kEmpty, kFenced, byte.held, atomic, state};
  }
}

void SharedMemory::race(const char* access, u32 address, const char* earlier, u32 thread, const Where& where) {
  block_.report("data race", where,
                text("%s at shared address 0x%x, %s by %s with nothing between that orders the two", access, address,
                     earlier, block_.name_of(thread).c_str()));
}

}  // namespace sim
