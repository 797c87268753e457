"""Turns build_matrix.yaml and templates/ into the cubins and manifest.json of a wheel; never imported by its users.

In the order of the data: :mod:`matrix` → :mod:`render` → :mod:`compilation`, which :mod:`ninja` carries out (it runs
:mod:`nvrtc` or :mod:`nvcc` once per kernel, and after either :mod:`nvdisasm` and :mod:`census`) → :mod:`budget` →
:mod:`package`. :mod:`cli` joins them for ``python -m codegen``, and :mod:`hatch_hook` runs that for a wheel.
"""
