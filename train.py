"""Synchronous training: `python train.py FLAGS`, or `ray job submit … -- python3 train.py FLAGS`."""

import sys

from vime.cluster.launch import main
from vime.config import parse_or_exit

if __name__ == "__main__":
    sys.exit(main(parse_or_exit(sys.argv[1:])))
