#include "report.h"

#include <cstdarg>
#include <cstdio>

namespace sim {

void Reports::clear(const void* image) {
  all_.clear();
  image_ = image;
}

void Reports::add(const char* kind, u32 block, const Where& where, std::string detail) {
  const u64 pc = where.site.file ? 0 : static_cast<const char*>(where.pc) - static_cast<const char*>(image_);
  const std::string file = where.site.file ? where.site.file : "";
  for (Report& known : all_) {
    if (known.kind == kind && known.pc == pc && known.line == where.site.line && known.file == file) {
      ++known.count;
      return;
    }
  }
  all_.push_back({kind, std::move(detail), file, where.site.line, pc, block, where.thread, 1});
}

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string ranges(const std::vector<u32>& ascending) {
  std::string result;
  for (size_t i = 0, end; i < ascending.size(); i = end) {
    for (end = i + 1; end < ascending.size() && ascending[end] == ascending[end - 1] + 1;) ++end;
    result += text(end - i > 1 ? "%s%u-%u" : "%s%u", i ? ", " : "", ascending[i], ascending[end - 1]);
  }
  return result;
}

}  // namespace sim
