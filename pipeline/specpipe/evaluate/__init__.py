"""Proof and measurement of a built pair."""
