"""Pictures of pages for the documentation."""

import matplotlib.image
import pytest

from scripts.page_picture import main
from tests.pages import browser


def test_the_picture_begins_with_a_section_and_has_the_size_that_is_asked_for(tmp_path):
    browser.browser_path()
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(
        "<!DOCTYPE html><body style='margin:0;background:#00f'><div style='height:2000px'></div>"
        "<div id='there' style='height:2000px;background:#f00'></div></body>"
    )
    assert main([str(page), str(picture), "--section", "there", "--width", "320", "--height", "200"]) == 0
    drawn = matplotlib.image.imread(picture)
    assert drawn.shape[:2] == (200, 320) and (drawn[..., :3] == [1, 0, 0]).all()


def test_without_a_browser_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(tmp_path / "page.html"), str(tmp_path / "page.png")]) == 1
    assert "Chromium: must be installed. Got none on PATH. Run apt-get install chromium." in capsys.readouterr().err


@pytest.mark.parametrize("required", [False, True])
def test_tests_without_a_browser_are_skipped_but_fail_where_one_is_required(tmp_path, monkeypatch, required):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(browser.REQUIRED, "1" if required else "")
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match="Chromium: apt-get install chromium"):
        browser.browser_path()
