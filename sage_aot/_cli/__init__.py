"""The command ``sage-aot``: main.py reads its arguments. demo.py measures the inputs of demo_inputs.py; bench.py,
calibrate.py and audit.py are about hosts."""
