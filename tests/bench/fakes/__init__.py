"""Measures that take no time, for the specifications of the frame around them."""
