"""``python -m codegen``; see :mod:`codegen.cli`."""

import sys

from codegen.cli import main

sys.exit(main())
