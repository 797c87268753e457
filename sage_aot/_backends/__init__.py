"""What runs a plan: the CUDA driver, or the emulation in torch. base.py has the interface of a backend."""
