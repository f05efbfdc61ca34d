"""The draft length that pays, from measurements: acceptance × costs → a model → what was measured.

workload.py    what every draft is asked, in tokens
acceptance.py  how often each draft position is accepted, on the user's prompts
costs.py       what a draft step, a verification and the rest of a step take, by load
model.py       both put together: what a draft length should gain
schedule.py    the draft length for each load, in the forms of specpipe, TensorRT-LLM and vLLM
candidates.py  other drafts for the same target, built aside
measure.py     what draft lengths gain, measured
progress.py    what was measured so far, so that an interrupted run goes on
run.py         all of it, in order
"""
