"""``python -m sage_aot``; see :mod:`sage_aot._cli.main`."""

import sys

from sage_aot._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
