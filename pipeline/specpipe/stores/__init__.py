"""Places that keep what was built for other machines: versions of pairs, and artifacts of stages.

store.py is the contract; every kind of place is a module beside it.
"""
