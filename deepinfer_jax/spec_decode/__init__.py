"""Speculative decoding: drafts, how many of them are verified, which are accepted.

Separate from the step because it knows no target layers: its functions turn confidences, laws and
drafted tokens into lengths and accepted tokens.
Read next: `schedule.py` (how many), `budgets.py` (how many rows in all), `verify.py` (which).
"""
