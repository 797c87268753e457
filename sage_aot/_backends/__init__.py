"""What runs a plan: the CUDA driver, or the emulation in torch. base.py has what a backend is."""
