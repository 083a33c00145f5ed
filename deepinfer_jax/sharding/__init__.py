"""Layouts: what lies where on a mesh, what devices tell each other, and what that costs.

Separate because a layout is a value that is checked, drawn and costed without a model or a device.
Read next: `layout.py` (the value), `exchange.py` (the collectives), `layout_plan.py` (what is predicted).
"""
