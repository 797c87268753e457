"""What kernels there are: names, tiles, the manifest of a folder, and the choice among them. No device, no torch."""
