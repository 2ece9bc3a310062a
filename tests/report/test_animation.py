"""Episodes as pictures: what is drawn is what was played."""

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from offmarl import envs
from offmarl.errors import OptionError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.report import animation


@pytest.fixture(scope="module")
def bridge() -> animation.Playback:
    env = envs.make("classic/bridge:time_limit=6")
    policy = make_policy(PolicyConfig("random"), env.spec)
    return animation.play(env, policy, (), jax.random.key(0))


def test_an_episode_is_played_to_its_end_and_not_beyond(bridge):
    assert bridge.name == "classic/bridge:time_limit=6"
    assert len(bridge.scenes) == len(bridge.score) == 7
    start = np.array(bridge.scenes[0].drones)
    assert start.tolist() == [[2.5, 1.5], [3.5, 1.5]]
    assert bridge.score[0] == 0.0
    assert (np.diff(bridge.score) < 0).all()  # every step away from the goals costs


def test_a_gif_has_a_frame_for_every_instant(bridge, tmp_path: Path):
    animation.save(bridge, tmp_path / "new" / "bridge.gif")
    with Image.open(tmp_path / "new" / "bridge.gif") as film:
        assert film.n_frames == 7
        assert film.info["duration"] == 100
        for number in range(film.n_frames):  # the agents' colours are not lost among the others
            film.seek(number)
            _assert_shows_both_agents(film.convert("RGB"))


def test_a_picture_shows_both_agents(bridge, tmp_path: Path):
    animation.save(bridge, tmp_path / "bridge.png")
    _assert_shows_both_agents(Image.open(tmp_path / "bridge.png"))


def _assert_shows_both_agents(picture) -> None:
    pixels = np.asarray(picture).reshape(-1, 3)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (np.abs(pixels - np.array(colour)).max(-1) <= 2).sum() > 50


def test_a_film(bridge, tmp_path: Path):
    pytest.importorskip("imageio_ffmpeg")
    animation.save(bridge, tmp_path / "bridge.mp4")
    assert (tmp_path / "bridge.mp4").read_bytes()[4:8] == b"ftyp"


def test_other_formats_are_refused(bridge, tmp_path: Path):
    with pytest.raises(OptionError, match=r"end it in \.gif or \.mp4 or \.png"):
        animation.save(bridge, tmp_path / "bridge.webm")


def test_what_cannot_be_drawn_says_so():
    env = envs.make("probe/one-step")
    policy = make_policy(PolicyConfig("random"), env.spec)
    with pytest.raises(OptionError, match="probe/one-step cannot be drawn"):
        animation.play(env, policy, (), jax.random.key(0))
