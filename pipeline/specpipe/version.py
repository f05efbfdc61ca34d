"""The version of specpipe, by itself: modules below need it, and none may import what is above."""

__version__ = "0.1.0"
