"""``python -m sage_aot``; see :mod:`sage_aot._tools.cli`."""

import sys

from sage_aot._tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
