"""The kernels in torch: the same scales, roundings and tiles, for CPU tensors and, on any device, as the tests' oracle."""
