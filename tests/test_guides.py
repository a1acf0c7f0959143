"""The guides and the README: their commands run, their flags exist, and the page of all flags is current."""

from tools import flags


def test_the_page_of_flags_is_current():
    assert flags.PAGE.read_text(encoding="utf-8") == flags.page(), "python tools/flags.py --write"


def test_check_fails_where_the_page_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(flags, "PAGE", tmp_path / "flags.md")
    monkeypatch.setattr(flags, "ROOT", tmp_path)
    assert flags.main([]) == 1
    assert flags.main(["--write"]) == 0 and flags.main([]) == 0
    flags.PAGE.write_text("other")
    assert flags.main([]) == 1
