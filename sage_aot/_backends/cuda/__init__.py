"""Calls of CUDA tensors: which kernels a device runs, workspace from torch's allocator, launches on torch's current
stream.

A kind of call is prepared once: its structs are packed, and its kernels bound to them. Every call of the kind then adds
the addresses of its tensors to the structs and queues the launches.
"""
