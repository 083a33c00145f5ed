"""How the nano model was made, runnable again.

Separate because inference never imports it.
Read next: `data.py` (text to rows), then `lm.py`.
"""
