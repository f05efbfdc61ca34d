"""Every night the same: build what changed, prove it, measure it, compare with the last good run.

run.py does it for one pair, all.py for many; what is bad is said by thresholds.py, and record.py
keeps the last good run.
"""
