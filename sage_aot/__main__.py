"""``python -m sage_aot info | demo``."""

from __future__ import annotations

import argparse
import sys

from sage_aot import info
from sage_aot.errors import SageAotError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sage_aot", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, the kernel each would run, what is missing")
    demo = commands.add_parser("demo", help="attention on the activations of a pretrained transformer, against float64")
    demo.add_argument("--png", default="sage_aot_demo.png", metavar="FILE",
                      help="picture to write (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.command == "info":
            print(info())
            return 0
        from sage_aot import _demo  # needs the extra `demo`

        return _demo.main(arguments.png)
    except SageAotError as error:
        print(f"sage_aot: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
