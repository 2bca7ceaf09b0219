"""A step reads the high plane whole, and more of the low plane the more rows it has."""

import pytest

from onebox.spec.hardware import BOXES
from onebox.spec.head_planes import HIGH_SHARE, head_read_share, planes_pay


def test_it_grows_from_the_high_plane_to_the_whole_head():
    assert head_read_share(0) == HIGH_SHARE
    shares = [head_read_share(rows) for rows in (1, 3, 12, 128)]
    assert shares == sorted(shares)
    assert shares[1] == pytest.approx(0.768, abs=0.002)
    assert 0.98 < shares[-1] < 1


def test_planes_pay_on_a_spark_and_where_the_speed_is_unknown_not_on_an_h200():
    head_bytes = 248_320 * 3_072
    assert planes_pay(head_bytes, BOXES["dgx-spark"].peak.bytes_per_second)
    assert planes_pay(head_bytes, None)
    assert not planes_pay(head_bytes, BOXES["h200"].peak.bytes_per_second)
