"""Pages of the checkout that are made from data are up to date."""

from dataclasses import replace

from benchmarks import page, results
from docs import layers


def test_contributing_has_the_layers_of_pyproject():
    assert layers.PLACE.search(layers.PAGE.read_text())
    assert layers.PAGE.read_text() == layers.page(), "run `python -m docs.layers`"


def test_the_page_of_measurements_is_up_to_date_and_short():
    text = page.page()
    assert page.PAGE.read_text() == text, "run `python -m benchmarks.page`"
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) <= 200


def test_every_row_says_what_where_and_when():
    rows = [row for path in page.TOPICS for row in results.read(path)[1]]
    assert all(row.claim and row.value and row.machine and row.date for row in rows)
    assert len({row.claim for row in rows}) == len(rows)
    assert not [row.claim for row in rows if row.aim and row.met is None]


def test_a_new_row_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "topic.json"
    first, second = (results.measured(__file__, claim, "1 ms") for claim in ("reads", "writes"))
    results.write(path, [first, second])
    results.write(path, [replace(first, value="2 ms")])
    assert results.read(path) == ("Topic", [replace(first, value="2 ms"), second])
    assert first.script == "test_generated.py" and first.machine and first.date
