"""From a problem to launches: which kernels, what workspace, what grids, what structs. Pure; nothing here runs them."""
