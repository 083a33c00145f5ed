"""The model as pure functions over pytrees: rows and a cache in, hidden states out.

Separate because it knows neither requests nor devices.
Read next: `backbone.py`.
"""
