"""What tests ask of processes, which may be gone at any moment."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> str:
    """Empty of a process that is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_running(pid: int) -> bool:
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def children_with(text: str) -> list[psutil.Process]:
    """What this process and those that it started have started, with ``text`` in the command line."""
    return [process for process in psutil.Process().children(recursive=True) if text in command_of(process)]
