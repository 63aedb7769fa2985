"""Measures that need an H200. Each module runs alone (``python -m bench.h200.NAME``) and prints one JSON object."""
