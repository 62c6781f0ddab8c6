"""The README says what the sources and the committed results say."""

from tools.readme_tables import README, generated


def test_readme_is_up_to_date() -> None:
    assert generated(README.read_text()) == README.read_text(), "run python -m tools.readme_tables"
