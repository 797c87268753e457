"""The kernels that there are: axes, names, tiles, the manifest of a folder. No device, no torch."""
