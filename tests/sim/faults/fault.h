// What every faulty kernel of this folder is launched with: two blocks of 64 threads, 4096 bytes of dynamic shared memory.
// A comment `fault: <kind>` marks each line that must be reported, or of which one must be, with the block and the thread
// where only one can be the first; test_faults.py reads them.
#pragma once

struct Params {
  const float* in;  // [256], ones
  float* out;       // [256], not written yet
};
