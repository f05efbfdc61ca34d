"""The version of specpipe, by itself: modules below need it, and none may import what is above."""

__version__ = "0.2.0"

BUILDS_ALIKE = frozenset({"0.1.0", "0.2.0"})
"""Versions that write the same artifacts from the same inputs and settings, so that an upgrade
builds nothing again. A release whose stages write anything else begins the set anew."""
