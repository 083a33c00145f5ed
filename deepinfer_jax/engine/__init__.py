"""The imperative shell: the only part that mutates.

Separate so that everything below stays pure.
Read next: `generate.py` (ids to ids), `llm.py` (text to text).
"""
