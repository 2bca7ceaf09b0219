"""Progress in a log: lines at intervals, with what is done, the speed and the time left."""

import re

from onebox.cli import progress


def test_a_long_transfer_is_followed_in_a_log(capsys, monkeypatch):
    clock = iter([100.0, 110.0, 140.0, 150.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.byte_progress("fetching", 10_000_000_000) as add:
        add(1_000_000_000)  # after 10 s: too early
        add(1_000_000_000)  # after 40 s
        add(1_000_000_000)
    assert re.findall(".+", capsys.readouterr().err) == ["fetching: 2.00 of 10.00 GB, 50 MB/s, 3 min left"]
