"""Python snippets, commands and links of the README and the documentation are valid."""

import contextlib
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

import offmarl
from offmarl import cli, envs
from offmarl.cli import verbs
from offmarl.evaluation import evaluate
from offmarl.hub import card as catalogue
from offmarl.networks import PolicyConfig
from offmarl.programs import registry
from offmarl.programs.recording.tiers import Ladder
from offmarl.report import render
from tests.docs.test_snippets import call
from tests.hub.conftest import hub  # noqa: F401  (a fixture)
from tests.hub.stock import stock_archive
from tests.runs import write_policy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LEARNERS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/learners.md").read_text(), re.DOTALL)
PAGES = {
    path: path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
COMMANDS = sorted(
    {
        line
        for page in PAGES.values()
        for line in re.findall(r"^offmarl [^#\n]*", page.replace("\\\n", " "), re.MULTILINE)
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link, place in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", PAGES[page]):
        target = (page.parent / link) if link else page
        assert target.exists(), link
        if place:
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            places = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
            assert place in places, place


def test_every_page_and_every_command_is_in_the_documentation():
    docs = ROOT / "docs"
    overview = (docs / "index.md").read_text()
    inside = [page.relative_to(docs) for page in PAGES if page.is_relative_to(docs)]
    assert all(f"({page})" in overview for page in inside if page.name != "index.md")
    commands = (ROOT / "docs" / "command-line.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", commands, re.MULTILINE)) == verbs.VERBS.keys()


def test_every_program_is_in_the_table():
    programs = (ROOT / "docs" / "baselines.md").read_text()
    for kind in ("recorder", "baseline"):
        for name, path in registry.find(kind).items():
            assert f"| {kind} | [`{name}`](../{kind}s/{path.name})" in programs


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_have_the_options_they_are_given(line, monkeypatch, capsys):
    # A file that the reader writes names the program, and all of these take --config.
    command = re.sub(r" --config \S+", " bc", line)
    monkeypatch.setattr("sys.argv", [*shlex.split(command), "--help-all"])
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    for option in set(re.findall(r"--[a-z-]+", line)) - {"--json"}:  # which every command takes
        assert option in text


@pytest.mark.slow
def test_the_loop_returns_what_evaluation_does(tmp_path, monkeypatch):
    """If a key were used twice, agents would repeat their actions: a return of 3.2, not 9.3."""
    monkeypatch.chdir(tmp_path)
    env = envs.make("swarm/coverage-3")
    run, config = (
        Path("runs/swarm/coverage-3/mappo-0-medium/bc"),
        PolicyConfig("feedforward", hidden=8),
    )
    write_policy(run, config, env.spec, [0], greedy=False)
    policy = offmarl.load_policy(run, greedy=False)
    play = jax.jit(lambda key: evaluate(env, policy.policy, policy.params, key, 256).returns)
    (snippet,) = (snippet for snippet in LEARNERS if "load_policy" in snippet)
    setup, begin, loop = snippet.partition("key, reset_key = ")
    namespace, returns = {"offmarl": offmarl, "jax": jax}, []
    exec(setup, namespace)
    for seed in range(8):
        exec((begin + loop).replace("key(0)", f"key({seed})"), namespace)
        returns.append(float(namespace["team_return"]))
    assert np.std(returns) > 0
    np.testing.assert_allclose(np.mean(returns), play(jax.random.key(1)).mean(), atol=1.5)


INSTALLS = "python3 -m venv "
"""Begins the two commands that install from a checkout; CI runs them."""

SMALLER = {
    "--total-steps 160000 --steps 20000": "--total-steps 4096 --steps 2000 --num-envs 8 "
    "--evaluations 2 --eval-episodes 2",
    "--seeds 5 --updates 1000": "--seeds 3 --updates 4 --eval-every 4 --eval-episodes 2 "
    "--final-episodes 2",
    "--steps 50000": "--steps 256",
}
"""Sizes in commands of the README, and those that the test takes instead."""


@pytest.fixture
def published(hub, random_data, tmp_path):  # noqa: F811
    """Publish a small dataset on the loopback hub under the name that the README pulls."""
    card = (ROOT / "datasets/og_marl/smac_v1/3m.toml").read_text()
    file = hub.cards / "og_marl/smac_v1/3m.toml"
    file.parent.mkdir(parents=True)
    # Of its own archive the hub knows neither the commit nor the hash.
    file.write_text(re.sub(r"^(revision|size|sha256) = .*\n", "", card, flags=re.MULTILINE))
    catalogue.names.cache_clear()
    data = random_data("swarm/coverage-3")
    archive = stock_archive(data, "3m", "Good", tmp_path / "stock")
    hub.commit("InstaDeepAI/og-marl", {"core/smac_v1/3m.zip": archive})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*which PyMARL's layout does not tell")
@pytest.mark.usefixtures("published")
def test_the_blocks_run_in_order_in_an_empty_directory(tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setattr(Ladder, "check", lambda *_: None)  # recorders get too few steps to learn
    # Other tests draw every frame of a film.
    to_gif = render.to_gif
    monkeypatch.setattr(render, "to_gif", lambda film, every=1: to_gif(film, 20 * every))
    readme = README
    for large, small in SMALLER.items():
        assert large in readme
        readme = readme.replace(large, small)
    blocks = re.findall(r"```(\w+)\n(.*?)```", readme, re.DOTALL)
    assert {language for language, _ in blocks} == {"bash", "python"}
    installed, shapes = 0, []
    for language, code in blocks:
        capsys.readouterr()
        if language == "python":
            namespace = {}  # a block imports what it uses
            exec(code, namespace)
            printed = capsys.readouterr().out.splitlines()
            promised = re.findall(r"^print.*# (\(.*?\))", code, re.MULTILINE)
            shapes += [*zip(printed, promised, strict=True)]
            continue
        for line in code.splitlines():
            installed += line.startswith(INSTALLS)
            if not line.startswith(INSTALLS):
                call(line.removeprefix("offmarl "))
    assert installed == 2 and len(shapes) == 3
    for text, promised in shapes:
        assert text.startswith(promised.removesuffix(", ...)").removesuffix(")"))
    assert (empty / "data.html").exists() and (empty / "report.html").exists()
