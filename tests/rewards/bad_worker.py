"""A grader process with graders that misbehave."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from vime.rewards import registry, worker
from vime.types import Grade


def grade(response, label, metadata):
    match response:
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "crash":
            os._exit(3)
        case "leave":
            daemon = subprocess.Popen(["sleep", "60"])
            pathlib.Path(label).write_text(str(daemon.pid))
            os._exit(3)
        case "bomb":
            bytearray(1 << 40)
        case "raise":
            raise ZeroDivisionError("by nought")
        case "print":
            print("not a grade")
        case "later":
            time.sleep(1.5)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            time.sleep(0.05)
    return Grade(score=float(os.getpid() if response == "pid" else label))


if __name__ == "__main__":
    registry.load = lambda name: grade
    sys.exit(worker.main(sys.argv[1:]))
