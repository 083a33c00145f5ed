"""What tests share: tolerances, tiny models, golden readers, chunk runners, plain reference formulas.

Inside the package so that benchmarks, notebooks and other people's tests can use it.
Read next: `presets.py`, `golden.py`, `references.py`, `tolerances.py`.
"""
