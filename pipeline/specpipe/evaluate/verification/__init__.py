"""Proof on the user's own artifact that speculation changes the time and not the output."""
