"""A step reads the high plane whole, and more of the low plane the more rows it has."""

import pytest

from onebox.spec.head_planes import HIGH_SHARE, head_read_share


def test_it_grows_from_the_high_plane_to_the_whole_head():
    assert head_read_share(0) == HIGH_SHARE
    shares = [head_read_share(rows) for rows in (1, 3, 12, 128)]
    assert shares == sorted(shares)
    assert shares[1] == pytest.approx(0.768, abs=0.002)
    assert 0.98 < shares[-1] < 1
