"""Triton as a process: found, started, watched and ended."""
