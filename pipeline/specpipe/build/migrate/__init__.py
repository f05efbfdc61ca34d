"""`specpipe migrate`: a YAML for what somebody runs today, from its own settings."""
