from fedclade.report import markup


def test_an_interval_is_drawn_on_a_scale_from_0_to_1():
    """The picture is 140 pixels wide, with a margin of 6 at both ends for half a dot."""
    picture = markup.interval(0.0, 0.5, 1.0, [0.25])
    assert 'd="M6 8H134"' in picture
    assert 'cx="70"' in picture
    assert 'cx="38.0"' in picture
