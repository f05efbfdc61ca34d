"""The YAML: its sections, and how its faults are told."""
