import doctest

import pytest

from fedclade.report import formats


def test_examples():
    assert doctest.testmod(formats).failed == 0


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (formats.number(-0.001), "0.00"),
        (formats.percent(-0.05), "−5.0 %"),
        (formats.traffic(999_960), "1.0 MB"),
        (formats.traffic(0), "0 B"),
        (formats.traffic(5e15), "5000.0 TB"),
        (formats.duration(59.97), "1 min 00 s"),
        (formats.duration(3599.6), "1 h 00 min"),
    ],
)
def test_limits(written, text):
    assert written == text
