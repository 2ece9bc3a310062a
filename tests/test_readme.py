"""The README does what it says: its Python runs, and its commands exist."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

import offmarl
from offmarl import cli, envs, recording
from offmarl.cli import programs
from offmarl.networks import PolicyConfig, make_policy

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = re.findall(r"^offmarl .*", README, re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINKS = re.findall(r"\]\((?!https?:)([^)#]+)", README)


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_somewhere(link):
    assert (Path(__file__).parents[1] / link).exists()


def test_every_program_is_in_the_table():
    for kind in ("recorder", "baseline"):
        for name in programs.find(kind):
            assert f"| {kind} | [`{name}`]({kind}s/{name}.py)" in README


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_have_the_options_they_are_given(line, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [*shlex.split(line), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    for option in re.findall(r"--[a-z-]+", line):
        assert option in text


@pytest.mark.slow
def test_snippets_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    env = envs.make("swarm/coverage-3")
    uniform = make_policy(PolicyConfig("random"), env.spec)
    vault = Path("vaults/swarm/coverage-3.vlt/medium")
    recording.record_policy(env, uniform, (), vault, steps=2000, num_envs=8)
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
