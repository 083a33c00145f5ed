"""From logits to tokens: pure functions of logits, parameters and counters.

Separate from the step because it knows no layers and the step knows no probabilities.
Read next: `sample.py` (the order of everything), `state.py`, `randomness.py`.
"""
