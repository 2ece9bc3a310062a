"""Environments of users: registered, of an installed package, of a module, of a file.

Each takes one file of the user's.
"""

import json
import sys
import textwrap

import jax
import pytest

import offmarl
from offmarl import envs
from offmarl._imports import code_digest
from offmarl.envs import registry
from offmarl.envs.probes import Match
from offmarl.errors import OptionError, PluginError, UnknownNameError
from offmarl.types import EnvSpec
from tests.children import python

CODE = '''
"""A game."""

from dataclasses import dataclass, field

import jax.numpy as jnp

from outside_helper import PAYOFF
from offmarl import Discrete, EnvSpec, View
from offmarl.envs import restart, transition


@dataclass(frozen=True, kw_only=True)
class Game:
    """Agents choose; the first that chooses 1 earns for all."""

    num_agents: int = 2
    time_limit: int = 3
    bonus: float = 0.0

    @property
    def spec(self):
        return EnvSpec("", self.num_agents, 1, 1, Discrete(2), self.time_limit)

    def reset(self, key):
        return jnp.zeros((), jnp.int32), restart(self._view())

    def step(self, key, time, action):
        done = jnp.full(self.num_agents, time + 1 >= self.time_limit)
        reward = jnp.full(self.num_agents, PAYOFF * action.max() + self.bonus)
        return time + 1, transition(self._view(), reward, jnp.zeros_like(done), done)

    def _view(self):
        n = self.num_agents
        return View(jnp.zeros((n, 1)), jnp.zeros(1), jnp.ones((n, 2), bool), jnp.ones(n, bool))


def sized(num_agents, *, name, time_limit=3):
    return Game(num_agents=num_agents, time_limit=time_limit)


def failing():
    raise ValueError("no licence file")


def number():
    return 3
'''


@pytest.fixture
def clean(monkeypatch):
    """Forget what a test registers or imports."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = {*sys.modules}
    yield
    for name in {*sys.modules} - modules:
        if name.partition(".")[0] in ("outside_helper", "outside_game", "broken_game"):
            del sys.modules[name]


@pytest.fixture
def folder(clean, tmp_path, monkeypatch):
    """A directory with spaces in its name, that holds a file with environments."""
    place = tmp_path / "my games"
    place.mkdir()
    (place / "outside_game.py").write_text(CODE)
    helper = "PAYOFF = 1.0\n\ndef pay(more):\n    global PAYOFF\n    PAYOFF = more\n"
    (place / "outside_helper.py").write_text(helper)
    monkeypatch.chdir(tmp_path)
    return place


def install(folder, name, points):
    """Write the metadata that pip would, beside the code."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[offmarl.envs]\n" + "\n".join(points) + "\n")
    sys.path.append(str(folder))


@pytest.mark.parametrize(
    "path", ["my games/outside_game.py", "./my games/../my games/outside_game.py", "absolute"]
)
def test_a_file_anywhere_is_an_environment(folder, path):
    path = folder / "outside_game.py" if path == "absolute" else path
    env = envs.make(f"{path}:Game:time_limit=5", bonus=1)
    assert env.spec.name == "outside_game.py:Game:bonus=1.0,time_limit=5"
    assert (env.spec.num_agents, env.time_limit) == (2, 5)
    assert envs.make(f"{path}:Game:bonus=1.0,time_limit=5") == env
    state, _ = env.reset(jax.random.key(0))
    _, step = env.step(jax.random.key(0), state, jax.numpy.array([0, 1]))
    assert step.reward.tolist() == [2, 2]
    info = envs.source(env.spec.name)
    assert info["file"] == str(path) and info["factory"] == "Game" and len(info["sha256"]) == 64


def test_a_changed_file_is_imported_again(folder, monkeypatch):
    """In the same second, with as many bytes, and where Python keeps compiled code."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = envs.make("my games/outside_game.py:Game")
    (folder / "outside_game.py").write_text(
        CODE.replace("time_limit: int = 3", "time_limit: int = 4")
    )
    assert before.spec.time_limit == 3
    assert envs.make("my games/outside_game.py:Game").spec.time_limit == 4


def test_a_module_is_found_in_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    env = envs.make("outside_game:sized:num_agents=4")
    assert (env.spec.name, env.spec.num_agents) == ("outside_game:sized:num_agents=4", 4)
    assert envs.source(env.spec.name) == {
        "module": "outside_game",
        "factory": "sized",
        "sha256": code_digest(folder / "outside_game.py"),  # with its helper
    }


def test_a_registered_environment(folder, monkeypatch):
    envs.register("mine/match", Match, envs.EnvInfo("the second probe", "2"))
    assert envs.describe()["mine/match"].agents == "2"
    assert envs.make("mine/match") == envs.make("mine/match")
    assert envs.make("mine/match").env == Match(name="mine/match")
    assert envs.family_of("mine/match") == "mine/match"
    monkeypatch.syspath_prepend(folder)
    from outside_game import Game, sized

    envs.register("mine/sized-N", sized)
    assert envs.make("mine/sized-5:time_limit=2").spec == EnvSpec(
        "mine/sized-5:time_limit=2", 5, 1, 1, offmarl.Discrete(2), 2
    )
    with pytest.raises(UnknownNameError, match="write mine/sized-N"):
        envs.make("mine/sized")
    envs.register("mine/plain", lambda *, name: Match(name=name))
    with pytest.raises(UnknownNameError, match=r"no option of mine/plain named .*: none exist"):
        envs.make("mine/plain:time_limit=3")
    envs.register("mine/labelled", lambda *, name, label="": Match(name=name))
    for label in ('a,b="c"', "1,2", "7", "", "a=b:c"):  # its own name makes it again
        spec = envs.make("mine/labelled", label=label).spec
        assert envs.make(spec.name).spec == spec and (spec.name == "mine/labelled") == (not label)
    envs.register("mine/match", Match)  # the same again, as in a notebook
    for used, owner in {"mine/match": "register", "mine/sized-3": "mine/sized-N"}.items():
        with pytest.raises(OptionError, match=f"taken.*{owner}"):
            envs.register(used, Game)
    for used in ("swarm/coverage-8", "swarm/coverage-N", "jaxmarl/smax/3m", "classic/xor"):
        with pytest.raises(OptionError, match="taken: offmarl defines"):
            envs.register(used, Game)


@pytest.mark.parametrize("name", ["", "a b", "../up", "/etc", "a:b", "a//b", "game.py:x"])
def test_names_that_cannot_be_registered(clean, name):
    with pytest.raises(OptionError, match="cannot name an environment"):
        envs.register(name, Match)


def test_an_environment_of_an_installed_package(folder):
    install(folder, "my-envs", ["outside/game-N = outside_game:sized"])
    assert envs.describe()["outside/game-N"].summary == "from the package my-envs 1.2"
    assert "outside_game" not in sys.modules  # to list it imports nothing
    env = envs.make("outside/game-3:time_limit=2")
    assert (env.spec.name, env.spec.num_agents) == ("outside/game-3:time_limit=2", 3)
    assert envs.source(env.spec.name) == {"package": "my-envs 1.2"}


def test_a_broken_package_is_named_and_breaks_no_other(folder):
    (folder / "broken_game.py").write_text("import nothing_like_that\n")
    install(folder, "good-envs", ["good/game = outside_game:Game"])
    install(folder, "bad-envs", ["bad/game = broken_game:Game", "bad/gone = outside_game:Gone"])
    assert {"good/game", "bad/game", "classic/xor"} <= envs.describe().keys()
    assert envs.make("good/game").spec.num_agents == 2
    for name, problem in {"bad/game": "nothing_like_that", "bad/gone": "Gone"}.items():
        with pytest.raises(PluginError, match=rf"bad-envs 1.2 provides.*{problem}.*uninstall"):
            envs.make(name)


def test_two_packages_with_one_name(folder):
    install(folder, "one-envs", ["outside/game = outside_game:Game", "classic/xor = x:y"])
    install(folder, "other-envs", ["outside/game = outside_game:Game"])
    assert "outside/game" in envs.names()
    with pytest.raises(OptionError, match=r"ambiguous.*one-envs 1.2.*other-envs 1.2"):
        envs.make("outside/game")
    with pytest.raises(OptionError, match=r"ambiguous.*offmarl and 'classic/xor' of one-envs 1.2"):
        envs.make("classic/xor")
    assert envs.make("classic/bridge").spec.num_agents == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my games/nothing.py:Game", "not a Python file"),
        ("my games/outside_game.py", r"write .*outside_game.py:FACTORY"),
        ("my games/outside_game.py:Gme", "has no Gme: it defines Game"),
        ("my games/outside_game.py:Game:speed=1", "no option of .*'speed'|named 'speed'"),
        ("my games/outside_game.py:Game:time_limit=long", "must be of type int"),
        ("my games/outside_game.py:sized", "needs num_agents: write .*num_agents=VALUE"),
        ("my games/outside_game.py:failing", r"ValueError: no licence file \(outside_game.py"),
        ("my games/outside_game.py:number", "returned 3, which is not an environment"),
        ("my games/outside_game.py:__doc__", "cannot be called"),
        ("my games/wrong.py:Game", r"NameError: name 'nonsense' is not defined \(wrong.py, line 2"),
        ("my games/odd.py:Game", "SyntaxError"),
        ("no_such_module_at_all:Game", "No module named 'no_such_module_at_all'"),
    ],
)
def test_code_that_cannot_be_used_is_explained(folder, name, message):
    (folder / "wrong.py").write_text("\nnonsense\n")
    (folder / "odd.py").write_text("def def\n")
    with pytest.raises((OptionError, UnknownNameError), match=message):
        envs.make(name)


@pytest.mark.parametrize("code", ["{folder}/outside_game.py:Game", "outside_game:Game"])
def test_no_code_runs_that_data_names(folder, monkeypatch, code):
    """A name from a file reaches `make` through the spec, here as a vault or a run holds it."""
    monkeypatch.chdir(folder)
    sys.path.append(str(folder))
    (folder / "outside_game.py").write_text("raise RuntimeError('the code ran')")
    spec = EnvSpec(code.format(folder=folder), 2, 1, 1, offmarl.Discrete(2))
    copy = EnvSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert copy == spec
    with pytest.raises(UnknownNameError, match=r"does not run code that data names.*--env"):
        envs.make(copy.name)
    with pytest.raises(UnknownNameError, match="does not run code"):
        envs.info(copy.name)
    assert registry.code_of(copy.name) is None
    with pytest.raises(OptionError, match="the code ran"):
        envs.make(spec.name)  # which the user typed


def test_data_may_name_what_is_installed(folder):
    install(folder, "my-envs", ["outside/game = outside_game:Game"])
    spec = EnvSpec.from_json(envs.make("outside/game").spec.to_json())
    assert envs.make(spec.name).spec == spec


def test_listing_plugins_imports_neither_jax_nor_the_plugin(folder):
    install(folder, "my-envs", ["outside/game = outside_game:Game"])
    code = f"""
        import sys
        sys.path.append({str(folder)!r})
        import offmarl.envs as e
        assert "outside/game" in e.names()
        sys.exit(bool({{"jax", "outside_game"}} & {{*sys.modules}}))
    """
    python("-c", textwrap.dedent(code))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("swarm/coverage-8:time_limit=3", "swarm/coverage-8:time_limit=3"),
        ("../my games/mine.py:Game:a=1", "mine.py:Game:a=1"),
        ("package.module:Game", "package.module:Game"),
    ],
)
def test_a_short_name_has_no_directories_of_a_file(name, short):
    assert envs.short_name(name) == short
