"""Turns build_matrix.yaml and templates/ into the cubins and manifest.json of a wheel. The runtime never imports
codegen.

In the order of the data: :mod:`matrix` → :mod:`render` → :mod:`compilation` → :mod:`ninja` → :mod:`budget` →
:mod:`package`. ninja runs :mod:`nvrtc` or :mod:`nvcc` once per kernel, and :mod:`nvdisasm` and :mod:`census` on each
cubin. :mod:`cli` joins the modules for ``python -m codegen``; :mod:`hatch_hook` runs that command for a wheel.
"""
