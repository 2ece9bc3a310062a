"""The documentation site: a page for each entry of a registry, no warnings, no broken links."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("zensical", reason="needs pip install 'offmarl[docs]'")

from docs import examples, make, pages
from docs.links import broken_links
from offmarl import envs
from offmarl.hub import card as catalogue
from offmarl.programs import registry

ROOT = Path(__file__).parents[2]


def test_every_environment_has_a_page_that_builds_it():
    found = pages.environments({"swarm/flock-N": "flock.png"}, with_extras=False)
    index = found["catalogue/environments/index.md"]
    for name in envs.names():
        text = found[f"catalogue/environments/{pages.slug(name)}.md"]
        assert text.startswith(f"# {name}\n") and f"]({pages.slug(name)}.md)" in index
    flock = found["catalogue/environments/swarm-flock-n.md"]
    assert "(flock.png)" in flock and "| observation | 33 numbers |" in flock
    assert "`time_limit` (default `60`)\n:   Steps of an episode." in flock


def test_a_new_environment_gets_a_page():
    from offmarl.envs import classic
    from offmarl.envs.registry import _registered

    envs.register("mine/xor", classic.Xor)
    try:
        found = pages.environments({}, with_extras=False)
    finally:
        del _registered["mine/xor"]
    assert "[`mine/xor`](mine-xor.md)" in found["catalogue/environments/index.md"]
    assert "| agents | 2 |" in found["catalogue/environments/mine-xor.md"]


def test_every_dataset_has_a_page():
    found = pages.datasets()
    assert len(found) == 1 + len(catalogue.names())
    smac = found["catalogue/datasets/og_marl-smac_v1-3m.md"]
    assert "offmarl pull og_marl/smac_v1/3m/Good" in smac and 'cy="17"' in smac
    own = found["catalogue/datasets/offmarl-swarm-coverage-3.md"]
    assert "offmarl record mappo --env swarm/coverage-3" in own and "offmarl pull" not in own


def test_every_program_has_a_page_with_its_arguments_and_its_source():
    found = pages.algorithms()
    for kind in ("recorder", "baseline"):
        for name, path in registry.find(kind).items():
            text = found[f"catalogue/algorithms/{name}.md"]
            assert path.read_text().rstrip() in text and "`--learning-rate` (default" in text


def test_a_new_baseline_gets_a_page(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        '"""MINE: a new one."""\nfrom dataclasses import dataclass\n\n\n'
        '@dataclass\nclass Args:\n    width: int = 3\n    """How wide."""\n'
    )
    monkeypatch.setattr(registry, "find", lambda kind: {f"{kind}-x": tmp_path / "mine.py"})
    found = pages.algorithms()
    assert "MINE: a new one" in found["catalogue/algorithms/index.md"]
    assert "`--width` (default `3`)\n:   How wide." in found["catalogue/algorithms/baseline-x.md"]


def test_a_new_dataset_gets_a_page(monkeypatch):
    made = catalogue.Card("a/b/c", "Made for a test.", 2, "@misc{x}", catalogue.Licence("MIT"))
    monkeypatch.setattr(catalogue, "cards", lambda: iter([made]))
    found = pages.datasets()
    assert "Made for a test." in found["catalogue/datasets/a-b-c.md"]


def test_the_api_has_every_public_name():
    import offmarl

    found = pages.api()
    written = "\n".join(found.values())
    modules = dict(pages.public_modules())
    assert "offmarl.envs" in modules and "offmarl.vault" in modules
    for name in offmarl.__all__:
        listed = f"::: offmarl.{name}\n" in written or f"[`offmarl.{name}`]" in written
        assert listed or name.startswith("_")
    for name, module in modules.items():
        for one in pages.public_names(module):
            assert f"::: {name}.{one}\n" in found[f"api/{pages.slug(name)}.md"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_a_page_and_a_notebook(path):
    page = examples.howto(path.parent)[f"howto/{path.stem}.md"]
    notebook = examples.read(path)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert page.startswith("# ") and all(f"```python\n{cell}\n```" in page for cell in code)
    ast.parse("\n".join(code))
    text = examples.notebooks(path.parent)[f"{path.stem}.ipynb"]
    assert '"cell-0"' in text and text == examples.notebooks(path.parent)[f"{path.stem}.ipynb"]


def test_broken_links_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/index.html").write_text('<h1 id="here">x</h1><img src="../no.png">')
    (tmp_path / "index.html").write_text(
        '<a href="sub/#here">a</a><a href="sub/#gone">b</a><a href="nosuch/">c</a>'
        '<a href="https://example.org/x">d</a><a href="#top">e</a>'
    )
    assert broken_links(tmp_path) == [
        "index.html: sub/#gone",
        "index.html: nosuch/",
        "index.html: #top",
        "sub/index.html: ../no.png",
    ]


def test_a_link_out_of_the_site_is_refused(tmp_path):
    page = make.DOCS / "nosuch.md"
    with pytest.raises(FileNotFoundError):
        make._relinked(page, "nosuch.md", {})
    readme = ROOT / "README.md"
    with pytest.raises(make.SiteError, match=r"README.md links to .*not on the site"):
        make._relinked(readme, "index.md", {})


@pytest.mark.nightly  # .ci/run builds the whole site every time
def test_the_site_builds_without_warnings_or_broken_links(tmp_path):
    site = make.build(tmp_path, with_extras=False)
    assert len(list(site.rglob("*.html"))) > 100
    assert (site / "howto/published_data.ipynb").exists()
    html = (site / "api/offmarl.envs/index.html").read_text()
    assert 'id="offmarl.envs.make"' in html
    drawn = site / "catalogue/environments/pictures"
    assert 0 < sum(path.stat().st_size for path in drawn.glob("*.png")) < 300_000
    assert not re.search(r'(src|href)="https?://[^"]*\.(css|js|woff2?)"', html)
