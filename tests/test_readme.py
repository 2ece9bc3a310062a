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
from offmarl.evaluation import evaluate
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy, registry
from tests.runs import write_policy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
READING, WRITING = (
    re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    for page in ("reading.md", "writing.md")
)
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
    assert set(re.findall(r"^\| `([a-z]+)` \|", commands, re.MULTILINE)) == cli.VERBS.keys()


def test_every_program_is_in_the_table():
    for kind in ("recorder", "baseline"):
        for name, path in registry.find(kind).items():
            assert f"| {kind} | [`{name}`]({kind}s/{path.name})" in README


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_have_the_options_they_are_given(line, monkeypatch, capsys):
    # A file that the reader writes names the program, and all of these take --config.
    named = re.sub(r" --config \S+", " bc", line)
    monkeypatch.setattr("sys.argv", [*shlex.split(named), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    for option in set(re.findall(r"--[a-z-]+", line)) - {"--json"}:  # which every command takes
        assert option in text


def test_a_vault_is_written_as_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(WRITING[0], {})
    written = offmarl.vault.open_vault("own.vlt/first")
    assert written.num_steps == 160 and set(written.episodes.cause) == {"truncated"}


@pytest.mark.slow
def test_the_loop_returns_what_evaluation_does(tmp_path, monkeypatch):
    """Were a key used twice, agents would repeat their actions: 3.2 for the 9.3 of this policy."""
    monkeypatch.chdir(tmp_path)
    env = envs.make("swarm/coverage-3")
    run, config = (
        Path("runs/swarm/coverage-3/mappo-0-medium/bc"),
        PolicyConfig("feedforward", hidden=8),
    )
    write_policy(run, config, env.spec, [0], greedy=False)
    policy = offmarl.load_policy(run)
    play = jax.jit(lambda key: evaluate(env, policy.policy, policy.params, key, 256).returns)
    (snippet,) = (snippet for snippet in SNIPPETS if "load_policy" in snippet)
    setup, begin, loop = snippet.partition("key, reset_key = ")
    namespace, returns = {"offmarl": offmarl, "jax": jax}, []
    exec(setup, namespace)
    for seed in range(8):
        exec((begin + loop).replace("key(0)", f"key({seed})"), namespace)
        returns.append(float(namespace["team_return"]))
    assert np.std(returns) > 0
    np.testing.assert_allclose(np.mean(returns), play(jax.random.key(1)).mean(), atol=1.5)


@pytest.mark.slow
def test_snippets_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    env = envs.make("swarm/coverage-3")
    uniform = make_policy(PolicyConfig("random"), env.spec)
    vault = Path("vaults/swarm/coverage-3.vlt/mappo-0-medium")
    record_policy(env, uniform, (), vault, steps=2000, num_envs=8)
    train = ["train", "bc", "--vault", str(vault), "--updates", "1", "--final-episodes", "1"]
    monkeypatch.setattr("sys.argv", ["offmarl", *train])
    with contextlib.suppress(SystemExit):
        cli.main()
    capsys.readouterr()
    monkeypatch.setattr(offmarl, "load_dataset", lambda name: offmarl.open(vault), raising=False)
    namespace = {}
    for snippet in SNIPPETS:
        exec(snippet, namespace)
    shapes = re.findall(r"^print.*# (\(.*?\))", "\n".join(SNIPPETS), re.MULTILINE)
    for line, promised in zip(capsys.readouterr().out.splitlines(), shapes, strict=True):
        assert line.startswith(promised.removesuffix(", ...)").removesuffix(")"))
    assert namespace["team_return"] > 0
    for snippet in READING:
        exec(snippet, namespace)
    params = np.zeros((58, 5), np.float32)
    assert np.isfinite(namespace["loss"](params, params, namespace["batch"]))
    assert (namespace["same"].action == namespace["batch"].action).all()
