"""Filters under the names that command lines written for other versions give."""
