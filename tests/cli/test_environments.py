import sys

import pytest

from offmarl.envs.registry import options_of


def test_environments_are_listed_with_their_traits(offmarl):
    done = offmarl("envs", "--json")
    entries = done.json["environments"]
    tag = entries["jaxmarl/mpe/simple_tag_v3"]
    assert (tag["agents"], tag["traits"], tag["extra"]) == (
        "any",
        ["adversarial", "heterogeneous"],
        "envs",
    )
    assert entries["swarm/coverage-N"]["state"] == "native"
    text = offmarl("envs").out
    assert "jaxmarl/mpe/simple_speaker_listener_v4" in text
    assert "pip install 'offmarl[envs]'" in text.replace("\n", " ")


def test_a_part_of_the_list(offmarl):
    assert "one of: 2s3z, 3m" in offmarl("envs", "jaxmarl/smax/MAP").out
    entries = offmarl("envs", "probe/", "--json").json["environments"]
    assert len(entries) == 5
    offmarl.refuses("several environments: leave out --seconds", "envs", "probe/", "--seconds", "0")


@pytest.mark.slow
def test_one_environment_is_described_and_measured(offmarl):
    done = offmarl("envs", "classic/xor:time_limit=7", "--seconds", "0", "--json")
    data = done.json
    assert data["spec"]["time_limit"] == 7
    assert data["about"]["summary"].startswith("a matrix game")
    assert data["steps_per_second"] > 0


def test_the_options_of_an_environment_are_listed_with_their_defaults():
    options = options_of("swarm/coverage-3:action=continuous")
    assert options["time_limit"] == 50 and options["action"] == "discrete"
    assert options_of("classic/bridge") == {"time_limit": 50}


def test_the_leaves_of_images_and_trees_are_described(offmarl, tmp_path):
    (tmp_path / "pixels.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Any\n"
        "from offmarl.programs.runs.trained import _Blank\n"
        "from offmarl.types import *\n\n"
        "def Pixels():\n"
        "    camera = {'left': ArraySpec((4, 5, 3), 'uint8'), 'speed': ArraySpec((2,))}\n"
        "    return _Blank(EnvSpec('', 2, 0, 0, Discrete(3), observation=camera))\n"
    )
    name = f"{tmp_path}/pixels.py:Pixels"
    text = " ".join(offmarl("envs", name, "--seconds", "0").out.split())
    assert "left uint8 (4, 5, 3), speed float32 (2,)" in text
    assert "none: programs use the observations of all agents" in text
    assert "options none Next: offmarl record mappo --env" in text
    spec = offmarl("envs", name, "--seconds", "0", "--json").json["spec"]
    assert spec["observation"]["left"] == {"shape": [4, 5, 3], "dtype": "uint8"}


@pytest.mark.parametrize(
    ("name", "message"),
    [("classic/xro", "did you mean classic/xor"), ("swarm/coverage-N", "whole number")],
)
def test_an_environment_that_is_not_there(offmarl, name, message):
    done = offmarl("envs", name)
    assert done.code == 2
    assert message in done.err


def test_a_plugin_is_listed_and_a_broken_one_is_explained(offmarl, tmp_path, monkeypatch):
    info = tmp_path / "bad_envs-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-envs\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[offmarl.envs]\nbad/game = nothing_like_that:Game\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    entries = offmarl("envs", "--json").json["environments"]
    assert entries["bad/game"]["summary"] == "from the package bad-envs 1.2"
    done = offmarl("envs", "bad/game")
    assert done.code == 1
    assert "bad-envs 1.2" in done.err and "nothing_like_that" in done.err
