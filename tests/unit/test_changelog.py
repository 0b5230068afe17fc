"""Tests the files of which the changelog is made: their allowed text, the places of their lines,
and the text of a release."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import changelog
from changelog import Change, ChangelogError

EMPTY = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-11-23\n\n### Serving\n\n- Old.\n"

CHANGES = st.lists(
    st.builds(
        Change,
        st.sampled_from(changelog.KINDS),
        st.sampled_from(changelog.SUBJECTS),
        st.from_regex(r"[A-Z`][a-z ,:]{0,20}\.", fullmatch=True),
    ),
    min_size=1,
    max_size=8,
)


def test_the_changelog_and_the_files_of_changes_have_the_form() -> None:
    _, own, _ = changelog.split_page(changelog.PAGE.read_text())
    assert changelog.render_section(changelog.parse_section(own)) == own
    changelog.read_fragments(changelog.FOLDER)


@given(CHANGES, CHANGES)
def test_every_change_is_once_in_the_section_and_releases_stay(
    first: list[Change], second: list[Change]
) -> None:
    page = changelog.with_changes(changelog.with_changes(EMPTY, first), second)
    _, own, releases = changelog.split_page(page)
    assert sorted(changelog.parse_section(own)) == sorted([*first, *second])
    assert releases == changelog.split_page(EMPTY)[2]


def test_a_line_goes_below_its_kind_and_subject(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no change")
    (tmp_path / "b.md").write_text("Added, Pages, metrics and logs: A: b.\n\n")
    (tmp_path / "a.md").write_text("Fixed, Start and idle: Two.\nAdded, KVCache and SSD: One.\n")
    page = changelog.with_changes(EMPTY, changelog.read_fragments(tmp_path))
    assert page.partition("## [0.1.0]")[0] == (
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n#### KVCache and SSD\n\n- One.\n\n"
        "#### Pages, metrics and logs\n\n- A: b.\n\n### Fixed\n\n#### Start and idle\n\n- Two.\n\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- Something.\n", "x.md:1: write `Added, Subject: What a user notices.`"),
        ("\nBroken, API and clients: It.\n", "x.md:2: 'Broken' is none of: Added; Changed"),
        ("Added, Server: It.\n", "x.md:1: 'Server' is none of: Commands and configuration"),
        ("\n", "x.md: the file has no change"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.md").write_text(text)
    with pytest.raises(ChangelogError) as raised:
        changelog.read_fragments(tmp_path)
    assert str(raised.value).startswith(said)


def test_a_release_takes_what_is_unreleased() -> None:
    page = changelog.with_changes(EMPTY, [Change("Added", "API and clients", "It.")])
    released = changelog.with_release(page, "0.2.0", date(2026, 12, 1))
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n" in released
    assert released.endswith("## [0.1.0] - 2026-11-23\n\n### Serving\n\n- Old.\n")
    for wrong, version, said in (
        (released, "0.3.0", "is empty"),
        (page, "0.1.0", "already has"),
        (page, "next", "no version"),
        ("# Changelog\n", "0.2.0", "no section"),
        (page.replace("- It.", "It."), "0.2.0", "'It.'"),
    ):
        with pytest.raises(ChangelogError, match=said):
            changelog.with_release(wrong, version, date(2026, 12, 1))
