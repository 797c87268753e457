// Constants of mathematics.
#pragma once

namespace sage {

constexpr float kLog2E = 1.44269504088896f, kLn2 = 0.693147180559945f;

}  // namespace sage
