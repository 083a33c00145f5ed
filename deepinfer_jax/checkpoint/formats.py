"""The quantised storage formats, to the bit, in NumPy.

Separate because nothing here knows of files, names or devices: bytes in, float32 out, and back.
Read next: `reader.py` and `writer.py`, which call `check_quantized` and `quantize` per tensor.

    value[i, j] = payload[i, j] * 2^(scale[i // r, j // 32] - 127),   r = 32 (FP8 blocks) or 1 (rows)

Values are exact in float32, and in bfloat16 unless they fall below its smallest subnormal 2^-133
(an E4M3 subnormal under a scale below 2^-124).
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from ..arrays import Storage
from .errors import CheckpointError

GROUP = 32
"""Columns (and, for FP8 blocks, rows) that share a scale."""

_NAN_BYTE = 255
_UNIT_BYTE = 127
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
# The last scale byte whose product with the largest code is finite in float32.
_SAFE_SCALE = {Storage.FP8_BLOCK: 246, Storage.FP8_ROW: 246, Storage.MXFP4: 252}

# Built from bits: byte 0 is the subnormal 2^-127, which a shift into the exponent field would lose.
_E8M0_BITS = np.arange(256, dtype=np.uint32) << 23
_E8M0_BITS[0] = 1 << 22
_E8M0_BITS[_NAN_BYTE] = 0x7FC00000
_E8M0_VALUES = _E8M0_BITS.view(np.float32)

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1_VALUES = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
# Both elements of a byte at once: the low nibble is the even element.
_E2M1_PAIRS = np.stack([np.tile(_E2M1_VALUES, 16), np.repeat(_E2M1_VALUES, 16)], axis=-1)

# Least value that rounds to each code from 1 on; a tie goes to the even code, so the thresholds of
# odd codes lie just above the midpoint.
_E2M1_MIDPOINTS = (_E2M1_MAGNITUDES[:-1] + _E2M1_MAGNITUDES[1:]) / 2
_E2M1_THRESHOLDS = np.where(
    np.arange(1, 8) % 2 == 1, np.nextafter(_E2M1_MIDPOINTS, np.float32(np.inf)), _E2M1_MIDPOINTS
)


def scale_bytes(stored: np.ndarray, where: str) -> np.ndarray:
    """Read scales stored as E8M0, as their raw bytes or as float32 values.

    Args:
        stored: scales of any shape, float8_e8m0fnu or uint8 (byte b means 2^(b - 127)) or float32
            (the value itself).
        where: tensor and file, for the error.

    Returns:
        uint8 bytes of the same shape, none of them 255.

    Raises:
        CheckpointError: a NaN scale, a float32 scale that is no power of two in 2^-127..2^127, or
            another dtype.

    Source: spec/checkpoint.md section 3.
    """
    if stored.dtype == np.float32:
        return _bytes_of_values(stored, where)
    if stored.dtype not in (np.uint8, ml_dtypes.float8_e8m0fnu):
        raise CheckpointError(
            f"{where}: scales have dtype {stored.dtype}, expected E8M0, uint8 or float32; convert them"
        )
    stored = stored.view(np.uint8)
    count = int(np.count_nonzero(stored == _NAN_BYTE))
    if count:
        raise CheckpointError(
            f"{where}: {count} of {stored.size} scales are byte 255 (NaN), expected 0..254; "
            "the file is damaged or not in this format, download or convert it again"
        )
    return stored


def _bytes_of_values(stored: np.ndarray, where: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        mantissas, exponents = np.frexp(stored)
    # frexp's mantissa lies in [0.5, 1), so 2^e has exponent e + 1.
    is_valid = (mantissas == 0.5) & (exponents >= -126) & (exponents <= 128)
    if not is_valid.all():
        first = stored[~is_valid][0]
        raise CheckpointError(
            f"{where}: float32 scale {first}, expected a finite power of two from 2^-127 to 2^127; "
            "the scales of this format have no mantissa, so other values would be guessed at"
        )
    return (exponents + (_UNIT_BYTE - 1)).astype(np.uint8)


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Decode E8M0 bytes: 2^(b - 127), byte 255 as NaN.

    Args:
        scales: uint8 bytes.

    Returns:
        float32 of the same shape.
    """
    return _E8M0_VALUES[scales]


def check_quantized(storage: Storage, payload: np.ndarray, scales: np.ndarray, where: str) -> None:
    """Refuse what `dequantize` refuses, from the bytes; values are computed only to describe a fault.

    Args:
        storage: FP8_BLOCK, FP8_ROW or MXFP4.
        payload: float8_e4m3fn or uint8 [rows, columns]; for MXFP4 int8 or uint8 [rows, columns / 2].
        scales: uint8 bytes [ceil(rows / 32) or rows, ceil(columns / 32)].
        where: tensor and file, for errors.

    Raises:
        CheckpointError: shapes that do not fit, NaN in the payload, or a product beyond float32.

    Source: spec/checkpoint.md section 3.
    """
    rows, width = payload.shape
    _check_scales(scales, (rows, 2 * width if storage is Storage.MXFP4 else width), storage.block_rows, where)
    has_nan = storage is not Storage.MXFP4 and bool(((payload.view(np.uint8) & 0x7F) == 0x7F).any())
    # A larger scale may still be finite with the codes it has, which only the products tell.
    if has_nan or scales.max(initial=0) > _SAFE_SCALE[storage]:
        dequantize(storage, payload, scales, where)


def dequantize(storage: Storage, payload: np.ndarray, scales: np.ndarray, where: str) -> np.ndarray:
    """Decode one quantised tensor.

    Args:
        storage: FP8_BLOCK, FP8_ROW or MXFP4.
        payload: float8_e4m3fn or uint8 [rows, columns]; for MXFP4 int8 or uint8 [rows, columns / 2].
        scales: uint8 bytes [ceil(rows / 32) or rows, ceil(columns / 32)].
        where: tensor and file, for errors.

    Returns:
        float32 [rows, columns], finite.

    Raises:
        CheckpointError: shapes that do not fit, NaN in the payload, or a product beyond float32.

    Source: spec/checkpoint.md section 3.
    """
    codes = payload.view(np.uint8)
    if storage is Storage.MXFP4:
        values = _E2M1_PAIRS[codes].reshape(codes.shape[0], -1)
    else:
        values = _E4M3_VALUES[codes]
    with np.errstate(over="ignore", invalid="ignore"):
        values *= _spread(scale_values(scales), values.shape, storage.block_rows, where)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{where}: {int(np.count_nonzero(~np.isfinite(values)))} of {values.size} values are NaN (E4M3 "
            "0x7F or 0xFF) or overflow float32 with their scale, expected finite values; the file is "
            "damaged, download it again"
        )
    return values


def _spread(scales: np.ndarray, shape: tuple[int, ...], block_rows: int, where: str) -> np.ndarray:
    _check_scales(scales, shape, block_rows, where)
    rows, columns = shape
    wide = np.repeat(scales, GROUP, axis=1)[:, :columns]
    return wide if block_rows == 1 else np.repeat(wide, block_rows, axis=0)[:rows]


def _check_scales(scales: np.ndarray, shape: tuple[int, ...], block_rows: int, where: str) -> None:
    expected = (-(-shape[0] // block_rows), -(-shape[1] // GROUP))
    if scales.shape != expected:
        raise CheckpointError(
            f"{where}: scales have shape {scales.shape}, expected {expected} for values of shape {shape} "
            f"with one scale per {block_rows} x {GROUP}; check that this is the format's own scale tensor"
        )


def quantize(storage: Storage, values: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode one tensor with the smallest power-of-two scales that avoid saturation.

    Each group gets the least 2^e with amax / 2^e <= 448 (E4M3) or 6 (E2M1), and scale 1 if it is all
    zero; elements round to nearest, ties to the even code, signs of zero kept. Values that came out of
    `dequantize` return exactly; their bytes return if each group's largest payload is above half the
    format's maximum (otherwise the same values have a second encoding, which this rule prefers).

    Args:
        storage: FP8_BLOCK, FP8_ROW or MXFP4 (an even number of columns).
        values: float32 or bfloat16 [rows, columns], finite.
        where: tensor, for errors.

    Returns:
        Payload (float8_e4m3fn [rows, columns] or int8 [rows, columns / 2]) and float8_e8m0fnu scales.

    Raises:
        CheckpointError: values that are not finite, not a matrix, or an odd number of MXFP4 columns.

    Source: spec/checkpoint.md section 3; the scale rule is spec/model.md section 2, without its floor.
    """
    values = values.astype(np.float32)
    is_mxfp4 = storage is Storage.MXFP4
    if values.ndim != 2 or (is_mxfp4 and values.shape[1] % 2):
        raise CheckpointError(
            f"{where}: shape {values.shape}, expected a matrix{' with even columns' * is_mxfp4} to quantise"
        )
    if not np.isfinite(values).all():
        raise CheckpointError(f"{where}: holds NaN or infinity, which {storage.value} cannot store; fix it")
    block_rows = storage.block_rows
    maxima = _group_maxima(values, block_rows)
    scales = _smallest_scales(maxima, _E2M1_MAX if is_mxfp4 else _E4M3_MAX)
    # 2^-e has byte 254 - b, so the division is an exact multiplication.
    values *= _spread(scale_values(254 - scales), values.shape, block_rows, where)
    payload = _encode_e2m1(values) if is_mxfp4 else values.astype(ml_dtypes.float8_e4m3fn)
    return payload, scales.view(ml_dtypes.float8_e8m0fnu)


def _group_maxima(values: np.ndarray, block_rows: int) -> np.ndarray:
    maxima = np.maximum.reduceat(np.abs(values), np.arange(0, values.shape[1], GROUP), axis=1)
    if block_rows == 1:
        return maxima
    return np.maximum.reduceat(maxima, np.arange(0, values.shape[0], block_rows), axis=0)


def _smallest_scales(maxima: np.ndarray, limit: float) -> np.ndarray:
    # Exact: amax = m 2^k and limit = n 2^l give amax / 2^e <= limit for e >= k - l + (m > n).
    mantissas, exponents = np.frexp(maxima)
    limit_mantissa, limit_exponent = math.frexp(limit)
    scales = exponents - limit_exponent + (mantissas > limit_mantissa) + _UNIT_BYTE
    return np.where(maxima == 0, _UNIT_BYTE, np.clip(scales, 0, 254)).astype(np.uint8)


def _encode_e2m1(scaled: np.ndarray) -> np.ndarray:
    codes = np.searchsorted(_E2M1_THRESHOLDS, np.abs(scaled), side="right").astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8)
