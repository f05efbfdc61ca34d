"""Every night the same: build what changed, prove it, measure it, compare with what is promoted.

run.py does it for one pair, all.py for many; what is bad is said by thresholds.py (acceptance.py
and intervals.py for the rates, upstream.py for what else changed), and record.py keeps the last
good run, which is compared with where nothing is promoted.
"""
