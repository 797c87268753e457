"""The kernels in torch, with the same scales, roundings and tiles: for CPU tensors, and as the oracle of the tests."""
