"""The way from a problem to launches: kernels, workspace, grids, structs. Pure; nothing here runs them."""
