"""Every snippet of the documentation runs, page by page, in the order of the page.

Python runs in one namespace a page, commands of offmarl run in this process, other lines in a
shell. Sizes are cut down. Commands that need a hub have tests of their own in tests/hub; here, as
in tests/test_readme.py, only their options are checked.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import offmarl
from offmarl import cli, envs, programs
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.recording.tiers import Ladder
from tests.children import run
from tests.runs import write_policy

DOCS = Path(__file__).parents[2] / "docs"

HUB = re.compile(r"og_marl|3m\.zip|--remote|org/name|offmarl (push|cache|doctor)")
TRAINS = re.compile(r"offmarl (demo|tune|train|record|evaluate|compare|ope|report) ")

SMALLER = {
    "demo": "--seeds 1",
    "record": "--total-steps 512 --steps 256 --num-envs 4 --evaluations 2 --eval-episodes 2",
    "record psro": "--response-steps 256 --steps 256 --num-envs 4 --iterations 2 --episodes 4",
    "train": "--updates 4 --eval-every 2 --eval-episodes 2 --final-episodes 2 --seeds 1",
    "evaluate": "--eval-episodes 2",
    "cross-play": "--eval-episodes 2",
    "ope": "--updates 4 --episodes 8 --members 1",
}
"""Options that make a command small; they take the place of those that it is given."""

SMALLER_NUMBERS = {
    "episodes=1000": "episodes=4",
    "processes=4": "processes=1",
    "updates=20_000": "updates=4, eval_every=2, eval_episodes=2, final_episodes=2",
    "--steps 1e5": "--steps 500",
    "--episodes 500": "--episodes 5",
}


class Snippet(NamedTuple):
    """A block of code of a page."""

    language: str
    code: str
    test: str
    """What the comment before it says: ``<!-- test: skip, because ... -->``."""


def snippets_of(text: str) -> list[Snippet]:
    block = r"(?:<!-- test: (.*?) -->\n)?```(python|bash)\n(.*?)```"
    return [Snippet(lang, code, test) for test, lang, code in re.findall(block, text, re.DOTALL)]


PAGES = {
    path.relative_to(DOCS).as_posix(): snippets
    for path in sorted(DOCS.rglob("*.md"))
    if (snippets := snippets_of(path.read_text()))
}


def _marks(snippets: list[Snippet]) -> list[Any]:
    trains = any(snippet.language == "bash" and TRAINS.search(snippet.code) for snippet in snippets)
    return [pytest.mark.nightly if trains else pytest.mark.slow]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Return a directory with the vaults and the run that the pages use."""
    root = tmp_path_factory.mktemp("documented")
    env = envs.make("swarm/coverage-3")
    uniform = make_policy(PolicyConfig("random"), env.spec)
    first = root / "vaults/swarm/coverage-3.vlt/mappo-0-medium"
    programs.record_policy(env, uniform, (), first, steps=2000, num_envs=8)
    factory = 'import offmarl\n\ndef MyEnv():\n    return offmarl.envs.make("swarm/coverage-3")\n'
    (root / "mine.py").write_text(factory)
    for name in (
        "vaults/swarm/coverage-3.vlt/mappo-0-expert",
        "A.vlt/expert",
        "B.vlt/expert",
        "REF.vlt/x",
    ):
        shutil.copytree(first, root / name)
    config = PolicyConfig("feedforward", hidden=8)
    write_policy(
        root / "runs/swarm/coverage-3/mappo-0-medium/bc", config, env.spec, [0], greedy=False
    )
    bridge = envs.make("classic/bridge")
    uniform = make_policy(PolicyConfig("random"), bridge.spec)
    programs.record_policy(bridge, uniform, (), root / "b.vlt/x", steps=400, num_envs=4)
    call(f"convert {root}/b.vlt/x {root}/bridge_optimal.npz --to pymarl")
    shutil.rmtree(root / "b.vlt")
    return root


def call(line: str) -> None:
    """Run a command of offmarl in this process; it must succeed."""
    before, sys.argv = sys.argv, ["offmarl", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as stop:
        assert not stop.code, line
    finally:
        sys.argv = before


def smaller(line: str) -> str:
    """Return a command with small sizes."""
    verb = "record psro" if line.startswith("record psro") else line.split(maxsplit=1)[0]
    untrained = re.search("--policy|--from-run|record random ", line)
    options = "--steps 256" if untrained else SMALLER.get(verb, "")
    for name, _ in (pairs := re.findall(r"(--[\w-]+) (\S+)", options)):
        line = re.sub(rf" {name} \S+", "", line)
    return f"{line} {' '.join(f'{name} {value}' for name, value in pairs)}"


def run_bash(code: str) -> None:
    for line in re.sub(r"\\\n", " ", code).splitlines():
        command = line.partition(" #")[0].strip()
        if not command or HUB.search(command):
            continue
        if command.startswith("offmarl ") and ">" not in shlex.split(command):
            words = [*map(glob, shlex.split(command.removeprefix("offmarl ")))]
            call(smaller(" ".join(shlex.quote(part) for word in words for part in word)))
        else:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            home = {"PATH": path, "HOME": str(Path.cwd())}
            run(["bash", "-ec", command], env=os.environ | home)


def glob(word: str) -> list[str]:
    paths = sorted(map(str, Path().glob(word))) if "*" in word and "/" in word else []
    return paths or [word]


def given(page: str) -> dict[str, Any]:
    """Return the names that a page expects the reader to define."""
    if page == "writing.md":
        return {"number": 1, "DriverConformance": object, "pytest": pytest}
    if page == "adapters.md":
        from offmarl.programs.recording.python import RandomPolicy
        from tests.programs import pettingzoo

        def choose(observations: dict[str, Any]) -> dict[str, Any]:
            legal = {"knight": 2, "squire": 10}
            return {agent: legal[agent] for agent in observations}

        env = pettingzoo.Duel()
        return {
            "env": env,
            "choose": choose,
            "make_env": pettingzoo.Duel,
            "make_policy": RandomPolicy,
        }
    return {}


@pytest.mark.filterwarnings("ignore:.*fork")  # of threads, which workers never use
@pytest.mark.parametrize("page", [pytest.param(p, marks=_marks(s)) for p, s in PAGES.items()])
def test_the_snippets_of_a_page_run(page, prepared, tmp_path, monkeypatch):
    if page == "learners.md":
        pytest.importorskip("torch", reason="needs PyTorch")
    directory = shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(directory)
    # What the page makes itself must not be there yet.
    recording = "offmarl record mappo --env swarm/coverage-3 --tiers"
    for command, folder in (("offmarl train bc", "runs"), (recording, "vaults")):
        if any(command in snippet.code for snippet in PAGES[page]):
            shutil.rmtree(folder)
    monkeypatch.setenv("OFFMARL_QUIET", "1")
    monkeypatch.setattr(Ladder, "check", lambda *_: None)  # recorders get too few steps to learn
    monkeypatch.setattr(
        offmarl,
        "load_dataset",
        lambda name: offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-medium"),
        raising=False,
    )
    load_policy = offmarl.load_policy

    def load(run: str, **options: Any) -> Any:
        if not Path(run).exists():  # the run that a reader trains on a recording
            spec = offmarl.open(f"{Path(run).parts[1]}.vlt").spec
            write_policy(Path(run), PolicyConfig("feedforward", hidden=8), spec, [0], greedy=True)
        return load_policy(run, **options)

    monkeypatch.setattr(offmarl, "load_policy", load, raising=False)
    namespace = given(page)
    for snippet in PAGES[page]:
        if snippet.test.startswith("skip"):
            continue
        code = snippet.code
        for large, small in SMALLER_NUMBERS.items():
            code = code.replace(large, small)
        if snippet.language == "bash":
            run_bash(code)
            continue
        exec(code, namespace)


def test_the_parser_sees_every_snippet():
    text = "<!-- test: skip, x -->\n```bash\na\n```\n\n```python\nb\n```\n"
    assert snippets_of(text) == [Snippet("bash", "a\n", "skip, x"), Snippet("python", "b\n", "")]
    assert len(PAGES) > 10


def test_a_window_of_the_start_page_has_the_shape_it_prints():
    (code,) = (snippet.code for snippet in PAGES["start.md"] if "replay.sample" in snippet.code)
    assert np.prod(eval(re.search(r"# (\(.*\))", code)[1])) == 32 * 20 * 3
