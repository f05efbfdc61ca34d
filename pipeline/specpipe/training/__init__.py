"""Drafts trained on what their target answers."""
