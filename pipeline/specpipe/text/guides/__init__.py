"""Guides: what the text of an answer must be, compiled, checked and followed by llguidance."""
