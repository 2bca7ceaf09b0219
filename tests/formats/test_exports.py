import onebox.formats


def test_every_exported_name_exists_and_is_listed_once():
    names = onebox.formats.__all__
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(onebox.formats, name)] == []
