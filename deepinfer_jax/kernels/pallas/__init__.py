"""One folder per operation: reference, cases and, where one exists, kernels for a device.

Separate from `..` because only this folder may come to know Pallas.
Read next: `quantize/`, the smallest one.
"""
