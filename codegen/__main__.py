"""``python -m codegen``; see :mod:`codegen.cli`."""

import signal
import sys

from codegen.errors import INSTALL

try:
    from codegen.cli import main
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    if package in ("codegen", "sage_aot"):
        raise
    sys.exit(f"expected the package {package}, got none: {INSTALL}")

if hasattr(signal, "SIGPIPE"):  # Windows has none
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `codegen list | head` ends as other commands do
sys.exit(main())
