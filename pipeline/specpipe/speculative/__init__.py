"""The algorithm: draft, verify, accept, count. NumPy only; it is read and tested without any
runtime.
"""
