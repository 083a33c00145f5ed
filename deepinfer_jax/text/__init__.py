"""Text on one side, token ids on the other: tokenizer, chat encoding, streams. No JAX here.

Separate because the model and the engine know ids only.
Read next: `tokenizer.py`.
"""
