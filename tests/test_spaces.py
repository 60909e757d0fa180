import numpy as np
import pytest

from gym_compress.spaces import fit


def test_values_are_cast_where_they_stay_what_they_are():
    for values, source, kept in [
        ([0.1, 1 / 3], "f8", "f4"),  # rounded
        ([np.inf, np.nan], "f8", "f4"),
        ([1, 200], ">i8", "i2"),
        ([0, 255], "u2", "u1"),
        ([True, False], "?", "u1"),
        ([3, 4], "u1", "f4"),
    ]:
        frame = np.array(values, source)
        np.testing.assert_array_equal(fit(frame, (2,), np.dtype(kept)), frame.astype(kept), strict=True)


@pytest.mark.parametrize(
    ("values", "given", "kept"),
    [
        ([300], "u2", "u1"),
        ([-1000], "i8", "i1"),
        ([1e300], "f8", "f4"),
        ([1e6], "f4", "f2"),
        ([200], "u1", "i1"),
    ],
)
def test_values_that_would_change_are_refused(values, given, kept):
    with pytest.raises(ValueError, match=r"A frame (with the value|of dtype)"):
        fit(np.array(values, given), (1,), np.dtype(kept))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((2, 1), np.uint8), r"shape \(2, 1\).*shape \(2, 2\)"),
        (np.zeros((), np.uint8), r"shape \(\).*shape \(2, 2\)"),
        (np.zeros((2, 2), np.float32), "float32.*uint8"),
        (np.zeros((2, 2), np.int8), "int8.*uint8"),
        (np.zeros((2, 2), object), "object.*uint8"),
        (np.full((2, 2), 300, np.uint16), "value 300 .*uint8"),
        ("no frame", "shape"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(frame, message):
    with pytest.raises(ValueError, match=message):
        fit(frame, (2, 2), np.dtype(np.uint8))
