"""The command ``sage-aot``: main.py reads its arguments; bench.py and audit.py are commands about hosts."""
