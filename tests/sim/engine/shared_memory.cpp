#include "shared_memory.h"

#include <algorithm>
#include <cstring>

#include "block.h"

// The memory of a kernel's `extern __shared__ ... shared[]`, as large as the largest chip's.
constexpr sim::u32 kMostDynamicBytes = 232448;
alignas(1024) thread_local unsigned char shared[kMostDynamicBytes];

namespace sim {

SharedMemory::Record SharedMemory::words_[], SharedMemory::bytes_[];

void SharedMemory::start(u32 dynamic_bytes, const Image& kernel) {
  static_assert(kDynamicBase + kMostDynamicBytes <= kStaticBase);
  dynamic_ = shared, dynamic_bytes_ = dynamic_bytes;
  static_ = kernel.thread_local_begin, static_bytes_ = kernel.thread_local_bytes;
  forget(kDynamicBase, dynamic_bytes_);
  forget(kStaticBase, static_bytes_);
  readers_.start();
}

// Clears the block's own addresses alone: nothing beyond them is ever looked up, and to clear all would take longer
// than most blocks run.
void SharedMemory::forget(u32 address, u32 bytes) {
  std::memset(pointer_to(address), 0xff, bytes);
  std::fill_n(words_ + address / kWord, bytes / kWord + 1, Record{});
}

SharedMemory::Records SharedMemory::records(u32 address, u32 bytes) {
  if (address > kEnd || bytes > kEnd - address) return {&words_[0], &words_[0], address, kWord};  // was reported
  const u32 first = address / kWord, last = (address + bytes + kWord - 1) / kWord;
  bool whole = (address | bytes) % kWord == 0;
  for (u32 word = first; word < last; ++word) whole &= words_[word].state != kSplit;
  if (whole) return {&words_[first], &words_[last], address, kWord};
  for (u32 word = first; word < last; ++word) {
    if (words_[word].state == kSplit) continue;
    std::fill_n(bytes_ + word * kWord, kWord, words_[word]);
    words_[word].state = kSplit;
  }
  return {&bytes_[address], &bytes_[address + bytes], address, 1};
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
  if (holds(address, bytes)) return;
  block_.report("access outside an allocation", where,
                text("%s of %u bytes at byte %d of the %u bytes of dynamic shared memory", access, bytes,
                     static_cast<i32>(address - kDynamicBase), dynamic_bytes_));
  block_.stop();
}

void SharedMemory::read_any(u32 address, u32 bytes, const Where& where) {
  require("read", address, bytes, where);
  const Epoch now = order_.now(where.thread);
  const Records own = records(address, bytes);
  // One pass finds that a read is right, as nearly all are. A second pass finds the fault of a wrong one.
  Epoch ordered = now;  // a writer that was found to be ordered before
  u32 before = own.first->readers;
  u32 after = readers_.with(before, now, order_);
  for (Record& record : own) {
    if (record.state != kWritten || (record.writer != ordered && !order_.before(record.writer, where.thread))) {
      check_written(address, bytes, where) && check_ordered(address, bytes, where);
      return;
    }
    ordered = record.writer;
    if (record.readers != before) before = record.readers, after = readers_.with(before, now, order_);
    record.readers = after;
  }
}

void SharedMemory::add_reader(u32 address, u32 bytes, u32 reader) {
  const Epoch now = order_.now(reader);
  const Records own = records(address, bytes);
  u32 before = own.first->readers;
  u32 after = readers_.with(before, now, order_);
  for (Record& record : own) {  // most have the readers of those before them
    if (record.readers != before) before = record.readers, after = readers_.with(before, now, order_);
    record.readers = after;
  }
}

bool SharedMemory::check_written(u32 address, u32 bytes, const Where& where) {
  for (const Record& record : records(address, bytes)) {
    if (record.state == kWritten) continue;
    if (record.state == kPending) {
      block_.report("asynchronous copy read before it was waited for", where,
                    text("%u bytes at shared address 0x%x, which %s copies to", bytes, address,
                         block_.name_of(thread_of(record.writer)).c_str()));
    } else {
      block_.report("read of memory that nothing wrote", where,
                    text("%u bytes at shared address 0x%x", bytes, address));
    }
    return false;
  }
  return true;
}

bool SharedMemory::check_ordered(u32 address, u32 bytes, const Where& where) {
  Epoch ordered = order_.now(where.thread);  // the last writer that was found to be ordered before
  const Records own = records(address, bytes);
  for (const Record& record : own) {
    const Epoch writer = record.writer;
    if (record.state == kWritten && writer != ordered && !order_.before(writer, where.thread)) {
      race("read", own.address_of(record), "written", thread_of(writer), where);
      return false;
    }
    ordered = writer;
  }
  return true;
}

void SharedMemory::begin_read(u32 address, u32 bytes, const Where& where) {
  require("read", address, bytes, where);
  if (check_written(address, bytes, where) && check_ordered(address, bytes, where)) check_fenced(address, bytes, where);
  for (Record& record : records(address, bytes)) ++record.held;
}

void SharedMemory::check_fenced(u32 address, u32 bytes, const Where& where) {
  require("access of the async proxy", address, bytes, where);
  const Records own = records(address, bytes);
  for (const Record& record : own) {
    const u32 writer = thread_of(record.writer);
    if (record.unfenced == kFenced || block_.proxy_fences(writer) > record.unfenced) continue;
    if (block_.has_fenced(where.thread, record.writer)) continue;
    block_.report("access of the async proxy without fence.proxy.async", where,
                  text("shared address 0x%x, which %s stored to", own.address_of(record),
                       block_.name_of(writer).c_str()));
    return;
  }
}

void SharedMemory::end_read(u32 address, u32 bytes, u32 agent) {
  for (Record& record : records(address, bytes)) --record.held;
  add_reader(address, bytes, agent);
}

void SharedMemory::write(u32 address, u32 bytes, const Where& where) {
  require("write", address, bytes, where);
  claim(address, bytes, where, kWritten, block_.proxy_fences(where.thread));
}

void SharedMemory::update(u32 address, u32 bytes, const Where& where) {
  require("atomic", address, bytes, where);
  check_written(address, bytes, where);
  claim(address, bytes, where, kWritten, block_.proxy_fences(where.thread), true);
}

void SharedMemory::begin_copy(u32 address, u32 bytes, const Where& where) {
  require("asynchronous copy", address, bytes, where);
  claim(address, bytes, where, kPending, kFenced);
}

void SharedMemory::end_copy(u32 address, u32 bytes, u32 thread) {
  for (Record& record : records(address, bytes)) {
    record.state = kWritten;
    record.writer = order_.now(thread);
    record.unfenced = block_.proxy_fences(thread);
  }
}

// The bytes take a new value: all writes and reads of the old value must be ordered before.
void SharedMemory::claim(u32 address, u32 bytes, const Where& where, State state, u32 unfenced, bool atomic) {
  const Epoch now = order_.now(where.thread);
  const Records own = records(address, bytes);
  Epoch ordered = now;
  u32 ordered_readers = ReaderSets::kEmpty;
  bool faulty = false;  // one report an access
  for (Record& record : own) {
    if (!faulty && record.state == kPending) {
      faulty = true;
      block_.report("buffer overwritten while an asynchronous copy into it is pending", where,
                    text("%u bytes at shared address 0x%x, which %s copies to", bytes, address,
                         block_.name_of(thread_of(record.writer)).c_str()));
    }
    if (!faulty && record.held > 0) {
      faulty = true;
      block_.report("buffer overwritten while a pending instruction reads it", where,
                    text("%u bytes at shared address 0x%x", bytes, address));
    }
    if (!faulty && record.state == kWritten && !(atomic && record.atomic) && record.writer != ordered &&
        !order_.before(record.writer, where.thread)) {
      faulty = true;
      race("write", own.address_of(record), "written", thread_of(record.writer), where);
    }
    if (!faulty && record.readers != ordered_readers && record.state != kUnwritten) {
      for (const Epoch reader : readers_.members(record.readers)) {
        if (faulty || order_.before(reader, where.thread)) continue;
        faulty = true;
        race("write", own.address_of(record), "read", thread_of(reader), where);
      }
      ordered_readers = record.readers;
    }
    if (record.state == kWritten) ordered = record.writer;
    record = {now, ReaderSets::kEmpty, unfenced, record.held, atomic, state};
  }
}

void SharedMemory::race(const char* access, u32 address, const char* earlier, u32 thread, const Where& where) {
  block_.report("data race", where,
                text("%s at shared address 0x%x, %s by %s with nothing between that orders the two", access, address,
                     earlier, block_.name_of(thread).c_str()));
}

}  // namespace sim
