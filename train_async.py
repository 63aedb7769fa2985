"""Asynchronous training: `python train_async.py FLAGS`, or `ray job submit … -- python3 train_async.py FLAGS`."""

import sys

from vime.cluster.launch import main
from vime.config import parse_or_exit

if __name__ == "__main__":
    sys.exit(main(parse_or_exit(["--asynchronous", *sys.argv[1:]])))
