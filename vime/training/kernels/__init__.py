"""Triton kernels for what would otherwise be many small passes over memory. Only imported where there is a GPU.

Each is an autograd function beside its plain-torch twin: the tests compare the two, on a CPU by Triton's interpreter.
"""
