"""What differs between a CPU and a CUDA machine, in one place: nobody else asks whether there is a GPU."""

from vime.platform.device import Platform, current

__all__ = ["Platform", "current"]
