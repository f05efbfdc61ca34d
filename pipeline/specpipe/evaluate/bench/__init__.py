"""Load on an endpoint, what it measured, and what that says."""
