"""``python -m codegen``; see :mod:`codegen.cli`."""

import signal
import sys

from codegen.cli import main

if hasattr(signal, "SIGPIPE"):  # Windows has none
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `codegen list | head` ends as other commands do
sys.exit(main())
