"""The documentation site: a page for each entry of a registry, no warnings, no broken links."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("zensical", reason="needs pip install 'offmarl[docs]'")

import markdown

from docs import equations, examples, make, pages, scores
from docs.flow import Flow, Source, Trace, Weights, flow_of
from docs.links import broken_links
from docs.pictures import environment_pictures, flow_chart, scores_chart
from offmarl import envs
from offmarl.hub import card as catalogue
from offmarl.programs import registry

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_environment_has_a_page_that_builds_it():
    site = pages.environments(with_extras=False)
    index = site["catalogue/environments/index.md"]
    for name in envs.names():
        text = site[f"catalogue/environments/{pages.slug(name)}.md"]
        assert text.startswith(f"# {name}\n") and f"]({pages.slug(name)}.md)" in index
    flock = site["catalogue/environments/swarm-flock-n.md"]
    assert "/environments/swarm--flock-8.png)" in flock and "| observation | 33 numbers |" in flock
    assert "`time_limit` (default `60`)\n:   Steps of an episode." in flock


def test_every_dataset_has_a_page():
    site = pages.datasets()
    assert len(site) == 2 + len(catalogue.names())
    smac = site["catalogue/datasets/og_marl-smac_v1-3m.md"]
    assert "offmarl pull og_marl/smac_v1/3m/Good" in smac and 'cy="17"' in smac
    page = site["catalogue/datasets/offmarl-swarm-coverage-3.md"]
    assert "offmarl record mappo --env swarm/coverage-3" in page and "offmarl pull" not in page
    foraging = site["catalogue/datasets/offmarl-jumanji-lbf.md"]
    assert "## Baselines on medium" in foraging and "/environments/jumanji--lbf.png)" in foraging


def test_a_score_is_that_of_the_committed_runs():
    """The values of the page of measurements, and the recordings of the catalogue."""
    by_cell = {(score.dataset, score.baseline): score for score in scores.scores()}
    warehouse = by_cell["RWARE tiny-4ag medium", "bc"]
    assert round(warehouse.best.value, 2) == 2.56 and round(warehouse.sampled.value, 2) == 9.24
    assert warehouse.seeds == 10 and by_cell["LBF medium", "bc"].seeds == 15  # of two files
    assert by_cell["XOR random", "oryx"].normalised.value == 1.0
    assert by_cell["climbing random", "bc"].reference is None  # no card states one
    digests = {uid.digest for card in catalogue.cards() for uid in card.uids.values()}
    assert warehouse.digest in digests and by_cell["bridge expert", "bc"].digest not in digests
    assert {Path(name) for score in by_cell.values() for name in score.sources} == {
        Path(path.name) for path in scores.FOLDERS["separation"].glob("*.json")
    }


def test_the_chart_of_scores_has_a_mark_for_each():
    svg = scores_chart(scores.scores())
    root = ElementTree.fromstring(svg)
    marks = [score for score in scores.scores() if score.normalised]
    assert len(root.findall("g")) == len(marks)
    assert {text.text for text in root.findall("text[@class='end']")} == {s.dataset for s in marks}


def test_pictures_of_environments_are_small_and_of_names_that_exist():
    pictures = environment_pictures()
    assert pictures.keys() <= {x for name in envs.names() for x in pages.examples_of(name)}
    for suite in ("jaxmarl/mpe", "jaxmarl/smax", "jaxmarl/jaxnav", "jaxmarl/overcooked", "jumanji"):
        assert any(name.startswith(suite) for name in pictures)
    assert sum(path.stat().st_size for path in pictures.values()) < 400_000


@pytest.mark.parametrize(
    ("text", "contains"),
    [
        ("Q̄_k,i(s', a)²", "<msub><mover><mi>Q</mi>"),
        ("π*_i ∝ e^{e_i / α}", "<msubsup><mi>π</mi><mrow><mi>i</mi></mrow><mrow><mo>*</mo></mrow>"),
        ("Σ_{j≠i} KL(π ‖ μ)", "<mtext>KL</mtext>"),
        ("r_t+1 - r_T", '<mrow><mi>t</mi><mo stretchy="false">+</mo><mn>1</mn></mrow>'),
        ("α < β & γ", "&lt;</mo>"),
    ],
)
def test_an_equation_is_mathml(text, contains):
    html = equations.render(f"    critic  L = {text},\n        β = 1")
    root = ElementTree.fromstring(html)
    assert contains in html and "critic" in [span.text for span in root]
    assert "".join(root.itertext()).count("β") == 1 + text.count("β")


def test_only_indented_blocks_with_mathematical_signs_are_equations():
    text = "Text:\n\n    L = E[ ½ x² ]\n\nand\n\n    x = 1\n\n- item\n\n    more λ\n"
    html = markdown.markdown(text, extensions=["docs.equations"])
    assert html.count('<div class="equation">') == 1
    assert "<pre><code>x = 1" in html and "<p>more λ</p>" in html


def test_every_program_has_a_page_with_its_arguments_and_its_source(monkeypatch):
    monkeypatch.setattr(pages, "flow_of", lambda module: module.__name__)  # tested below
    monkeypatch.setattr(pages, "flow_chart", lambda flow, data: f"{data} of {flow}\n")
    site = pages.algorithms()
    for kind in ("recorder", "baseline"):
        for name, path in registry.find(kind).items():
            text = site[f"catalogue/algorithms/{name}.md"]
            assert path.read_text().rstrip() in text
            learns = name not in ("random", "psro")
            assert ("`--learning-rate` (default" if learns else "`--steps` (default") in text


@pytest.mark.slow
def test_a_new_baseline_gets_a_page(monkeypatch):
    path = ROOT / "examples/own_baseline.py"
    monkeypatch.setattr(registry, "find", lambda kind: {f"mine_{kind}": path})
    monkeypatch.setattr(pages, "flow_chart", lambda flow, data: f"losses: {flow.results[0]}\n")
    site = pages.algorithms()
    assert "[`mine_baseline`](mine_baseline.md)" in site["catalogue/algorithms/index.md"]
    text = site["catalogue/algorithms/mine_baseline.md"]
    assert "`--temperature` (default `1.0`)\n:   Lower values give" in text
    assert "losses: policy_loss" in text


@pytest.mark.slow
def test_the_flow_of_a_baseline_is_read_off_its_computation():
    flow = flow_of(registry.load("baseline", "qmix_cql"))
    assert flow.networks == ("agent", "mixer", "target agent", "target mixer")
    assert flow.results == ("cql_loss", "td_loss", "best action")
    assert flow.targets("observation") == {"agent", "target agent"}
    assert flow.targets("state") == {"mixer", "target mixer"}
    assert flow.targets("reward") == flow.targets("target agent") == {"td_loss"}
    assert flow.targets("agent") == set(flow.results)
    assert "behaviour_log_prob" not in flow.fields  # QMIX+CQL does not use it


def test_the_flow_passes_loops_branches_and_networks_in_a_row():
    def loop(weights, x, y):
        def body(carry, piece):
            return carry @ weights["inner"] + piece, piece

        after, pieces = jax.lax.scan(body, x, y)
        branch = jax.lax.cond(y.sum() > 0, lambda: after, lambda: 2 * after)
        return branch @ weights["outer"], pieces.sum()

    trace = Trace()
    inner, outer = ({Weights(name)} for name in ("inner", "outer"))
    eye = jnp.eye(2)
    inputs = {"inner": eye, "outer": eye}, jnp.ones(2), jnp.ones((3, 2))
    tags = [frozenset(sources) for sources in (inner, outer, {Source("x")}, {Source("y")})]
    first, second = trace.run(jax.make_jaxpr(loop)(*inputs).jaxpr, tags)
    assert first == {Source("outer", True)} and second == {Source("y")}
    assert trace.arrows == {
        *((name, "inner") for name in ("x", "y")),
        *((name, "outer") for name in ("inner", "y")),
    }


def test_a_diagram_has_a_box_for_each_name_and_fits_a_phone():
    flow = Flow(
        ("action", "observation"),
        ("actor", "critic"),
        ("critic_loss", "best action"),
        frozenset(
            {
                ("observation", "actor"),
                ("actor", "critic"),
                ("actor", "best action"),
                ("action", "critic_loss"),
                ("critic", "critic_loss"),
            }
        ),
    )
    svg = flow_chart(flow, "a batch")
    root = ElementTree.fromstring(svg.partition("\n")[0])
    rects = {text.text: rect for rect, *texts in root.iter("g") for text in texts}
    assert set(rects) == {*flow.fields, *flow.networks, *flow.results}
    x = {name: float(rect.get("x")) for name, rect in rects.items()}
    assert x["observation"] == x["action"] < x["actor"] < x["critic"] < x["critic_loss"]
    assert len(root.findall("path[@class='head']")) == len(flow.arrows)
    spans = [(float(r.get("y")), float(r.get("height"))) for r in rects.values()]
    width, height = map(float, root.get("viewBox").split()[2:])
    assert all(y >= 0 and y + tall <= height for y, tall in spans) and width < 700


def test_code_in_a_docstring_is_a_block_of_code():
    docstring = (
        "Does it.\n\nLike this::\n\n    a = 1\n\n>>> for x in ``y``:\n...     x\n>>> z\n\nEnd.\n"
    )
    code = "```python\nfor x in `y`:\n    x\nz\n```"
    assert pages.prose(docstring) == f"Does it.\n\nLike this:\n\n    a = 1\n\n{code}\n\nEnd.\n"


@pytest.mark.parametrize("absent", [(), ("torch", "torch.utils")], ids=["all", "without torch"])
def test_the_api_has_every_public_name(absent, monkeypatch):
    import offmarl
    from offmarl import replay

    for name in absent:  # as where PyTorch is not installed
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "offmarl.replay.torch", raising=False)
        for cached in ("TorchBatches", "TorchWindows"):
            monkeypatch.delitem(vars(replay), cached, raising=False)

    site = pages.api()
    written = "\n".join(site.values())
    modules = dict(pages.public_modules())
    assert "offmarl.envs" in modules and "offmarl.vault" in modules
    for name in offmarl.__all__:
        present = f"::: offmarl.{name}\n" in written or f"[`offmarl.{name}`]" in written
        assert present or name.startswith("_")
    for name, module in modules.items():
        for member in pages.public_names(module):
            assert f"::: {name}.{member}\n" in site[f"api/{pages.slug(name)}.md"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_a_page_and_a_notebook(path):
    page = examples.howto(path.parent)[f"howto/{path.stem}.md"]
    notebook = examples.read(path)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert page.startswith("# ") and all(f"```python\n{cell}\n```" in page for cell in code)
    ast.parse("\n".join(code))
    files = examples.downloads(path.parent)
    assert files[path.name] == path.read_text()
    assert examples.is_current(path), f"run `python -m docs.examples {path.stem}`"
    downloaded = json.loads(files[f"{path.stem}.ipynb"])
    assert downloaded["metadata"]["kernelspec"]["name"] == "python3"
    assert '%pip install -q "offmarl' in "".join(downloaded["cells"][1]["source"])
    outputs = any(cell.get("outputs") for cell in downloaded["cells"])
    printed = bool(re.search(r"^ *print\(", path.read_text(), re.MULTILINE))
    assert outputs == (printed and path.stem not in examples.NOT_RUN)


def test_a_page_opens_its_notebook_in_colab_where_the_repository_is_known():
    path = ROOT / "examples/torch_bc.py"
    assert "colab" not in examples.page(path)
    page = examples.page(path, "https://github.com/someone/offmarl")
    place = "blob/main/examples/notebooks/torch_bc.ipynb"
    assert f"https://colab.research.google.com/github/someone/offmarl/{place}" in page


def test_the_repository_is_that_of_the_package_or_of_the_workflow(monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert make.repository() == urls.get("Repository")
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/offmarl")
    stated = urls.get("Repository", "https://github.com/someone/offmarl")
    assert make.repository() == stated


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
    assert {path.name for path in (ROOT / "examples").glob("*.py")} <= {
        path.name for path in (site / "howto").iterdir()
    }
    assert (site / "howto/published_data.ipynb").exists()
    maicq = (site / "catalogue/algorithms/maicq/index.html").read_text()
    assert '<svg class="flow"' in maicq and ">target mixer</text>" in maicq
    html = (site / "api/offmarl.envs/index.html").read_text()
    assert 'id="offmarl.envs.make"' in html
    # Lines of code in a docstring that are not indented would be quotes.
    assert not any("<blockquote>" in page.read_text() for page in (site / "api").rglob("*.html"))
    assert (
        '<div class="equation">' in maicq
        and '<svg class="scores"' in (site / "index.html").read_text()
    )
    assert not re.search(r'(src|href)="https?://[^"]*\.(css|js|woff2?)"', html)
