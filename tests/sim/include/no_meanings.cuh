// In the place of a header of ptx/ whose wrappers have no meaning yet: the compiler names each one that a kernel calls.
#pragma once
