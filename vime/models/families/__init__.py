"""One architecture a file. A module here is found by itself: it needs a ``FAMILY``, and nothing else needs a change."""
