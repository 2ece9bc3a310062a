"""Settings from files: precedence, patterns, errors, and what a run keeps."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from offmarl import settings
from offmarl.config import Fraction, Positive, PositiveInt, Role, Validated, option
from offmarl.errors import OptionError
from offmarl.programs import registry

SPREAD = "jaxmarl/mpe/simple_spread_v3"

PACKAGED = """
[toy]
rate = 0.1
width = 128

[toy."simple_spread*"]
rate = 0.2

[toy."*:local_ratio=*"]
layers = [4, 4]

[other]
anything = 1
"""


@dataclass(frozen=True)
class Args(Validated):
    env: str = option("", Role.CASE)
    rate: Positive = 0.5
    width: PositiveInt = 64
    kind: Literal["a", "b"] = "a"
    layers: tuple[int, ...] = ()
    decay: Fraction | None = None
    path: Path | None = None


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A package with settings for ``mpe`` only."""
    (tmp_path / "mpe.toml").write_text(PACKAGED)
    monkeypatch.setattr(settings, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path / "mpe.toml"


def fill(env=SPREAD, file=None, packaged=True, **given):
    return settings.fill(Args, "toy", env, given, file, packaged)


@pytest.mark.parametrize(
    ("env", "rate", "width"),
    [
        ("jaxmarl/mpe/simple_tag_v3", 0.1, 128),
        (SPREAD, 0.2, 128),
        (f"{SPREAD}:num_agents=4", 0.2, 128),
        ("swarm/coverage-3", 0.5, 64),
        ("", 0.5, 64),
        ("mpe/path/of/mine.py:factory", 0.5, 64),
        ("mpe:factory", 0.5, 64),
    ],
)
def test_the_package_has_settings_for_families_and_patterns(packaged, env, rate, width):
    args = fill(env)
    assert (args.rate, args.width) == (rate, width)


def test_patterns_may_name_options(packaged):
    assert fill(f"{SPREAD}:local_ratio=1").layers == (4, 4)


def test_a_user_s_own_program_has_none_in_the_package(packaged):
    assert fill(packaged=False) == Args()


def test_given_values_come_first_then_the_file_then_the_package(packaged, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[toy]\nwidth = 32\nkind = 'b'\ndecay = 1\npath = 'x'\n")
    args = fill(file=file, kind="a")
    assert args == Args("", 0.2, 32, "a", (), 1.0, Path("x")) and type(args.decay) is float
    used = settings.origins_of(args)
    assert used.sources() == {
        "rate": 'offmarl/settings/mpe.toml [toy."simple_spread*"]',
        "width": f"{file} [toy]",
        "decay": f"{file} [toy]",
        "path": f"{file} [toy]",
    }
    assert used.lines(args) == [
        'rate 0.2 (from offmarl/settings/mpe.toml [toy."simple_spread*"])',
        f"width 32, decay 1.0, path x (from {file} [toy])",
        "kind a in place of b (given)",
    ]
    assert settings.origins_of(Args()).lines(Args()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[toy]\nrat = 1", r"mine.toml \[toy\]: no argument named 'rat': did you mean rate"),
        ("[toy]\nrate = 'x'", r"mine.toml \[toy\]: rate cannot be 'x': Expected `float`"),
        ("[toy]\nrate = -1", r"mine.toml \[toy\]: rate must be above 0 and finite, not -1"),
        ("[toy]\nwidth = 1.5", "width cannot be 1.5: Expected `int`"),
        ("[toy]\nwidth = true", "width cannot be True: Expected `int`"),
        ("[toy]\nkind = 'c'", "kind cannot be 'c': .*it must be one of a, b"),
        ("[toy]\nlayers = 3", "layers cannot be 3: Expected `array`"),
        ("[toy]\ndecay = 2", "decay must be from 0 to 1, not 2"),
        ("[toy]\nenv = 'x'", "env cannot be set in a file"),
        ('[toy."other*"]\nrat = 1', r'\[toy."other\*"\]: no argument named'),
        ("rate = 1", "rate is in no table"),
        ("[tou]\nrate = 1", r"has no table \[toy\]"),
        ("[toy", "is not valid TOML"),
    ],
)
def test_mistakes_in_files_are_named_with_their_place(tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(OptionError, match=message) as raised:
        fill(file=file)
    assert str(file) in str(raised.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(OptionError, match=r"there is no file .*, or 'reference'"):
        fill(file=tmp_path / "mine.toml")


def test_a_run_keeps_the_package_s_settings_that_it_was_started_with(packaged):
    args = fill(width=16)
    recorded = {"args": vars(args), **settings.origins_of(args).record()}
    packaged.write_text("[toy]\nwidth = 1\nlayers = [9]\n")  # rate is gone, layers is new
    again = fill(width=16)
    assert (again.rate, again.layers) == (0.5, (9,))
    result = settings.keep_packaged(again, recorded)
    assert (
        result == args
        and settings.origins_of(result).sources() == settings.origins_of(args).sources()
    )


def test_a_run_does_not_keep_what_the_user_changes(packaged, tmp_path):
    args = fill()
    recorded = {"args": vars(args), **settings.origins_of(args).record()}
    file = tmp_path / "mine.toml"
    file.write_text("[toy]\nwidth = 7\n")
    changed = settings.keep_packaged(fill(file=file, rate=0.9), recorded)
    assert (changed.rate, changed.width) == (0.9, 7)
    assert settings.keep_packaged(Args(), recorded) == Args()  # arguments made by hand
    assert settings.keep_packaged(fill(), {}) == fill()


def test_a_run_does_not_keep_what_was_given_then_and_is_missing_now(packaged):
    """The values differ from the run's, so that `open_run` refuses them."""
    args = fill(rate=0.9, kind="b")
    recorded = {"args": vars(args), **settings.origins_of(args).record()}
    again = settings.keep_packaged(fill(), recorded)
    assert (again.rate, again.kind) == (0.2, "a")
    assert settings.origins_of(again).sources()["rate"].startswith("offmarl/settings/mpe.toml")


def test_the_package_s_files_are_valid():
    programs = {
        name: (kind, registry.load(kind, name))
        for kind in registry.VERBS
        for name in registry.find(kind)
    }
    for path in Path(settings.__file__).parent.glob("*.toml"):
        for name in tomllib.loads(path.read_text()):
            kind, program = programs[name]
            vault = {"vault": "x"} if kind == "baseline" else {}
            assert program.Args.for_env(f"{path.stem}/x", **vault)


def test_arguments_for_an_environment(packaged):
    qmix = registry.load("recorder", "qmix")
    packaged.write_text("[qmix]\nbatch_size = 7\n")
    args = qmix.Args.for_env(SPREAD, hidden=8)
    assert (args.env, args.batch_size, args.hidden) == (SPREAD, 7, 8)
    assert settings.origins_of(args).given == {"env", "hidden"}
    assert qmix.Args(env=SPREAD).batch_size == qmix.Args().batch_size != 7


def test_the_reference_settings_are_the_published_update():
    args = registry.load("baseline", "iql_cql").Args
    base = args.for_env("swarm/coverage-3", "reference", vault="a.vlt")
    assert (base.scale_rewards, base.bootstrap, base.cql_weight) == (False, "greedy", 3.0)
    source = settings.origins_of(base).sources()["cql_weight"]
    assert source == "offmarl/settings/reference.toml [iql_cql]"
    mixed = args.for_env("", "reference", vault="a.vlt", cql_weight=1.0)
    assert (mixed.bootstrap, mixed.cql_weight) == ("greedy", 1.0)
    bc = registry.load("baseline", "bc").Args  # which has no scale
    assert settings.origins_of(bc.for_env("", "reference", vault="a.vlt")).sources() == {}
    with pytest.raises(OptionError, match="for baselines, and mappo is none"):
        registry.load("recorder", "mappo").Args.for_env("swarm/coverage-3", "reference")
