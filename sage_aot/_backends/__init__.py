"""The backends, which run plans: the CUDA driver, and the emulation in torch. base.py has the interface of a
backend."""
