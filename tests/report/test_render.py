"""Pictures of episodes show the episodes that are played, or played again."""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from offmarl import envs, vault
from offmarl.envs import sides
from offmarl.errors import OptionError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.report import render
from offmarl.teams import Team
from offmarl.types import Policy

BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.fixture(scope="module")
def bridge() -> render.Playback:
    env = envs.make("classic/bridge:time_limit=6")
    policy = make_policy(PolicyConfig("random"), env.spec)
    return render.play(env, policy, (), jax.random.key(0))


def test_an_episode_is_played_to_its_end_and_not_beyond(bridge):
    assert bridge.name == "classic/bridge:time_limit=6"
    assert len(bridge.scenes) == len(bridge.score["return"]) == 7
    start = np.array(bridge.scenes[0].drones)
    assert start.tolist() == [[2.5, 1.5], [3.5, 1.5]]
    assert bridge.score["return"][0] == 0.0
    assert (np.diff(bridge.score["return"]) < 0).all()  # every step away from the goals costs


def test_opposing_teams_have_returns_of_their_own():
    env = envs.make("swarm/pursuit-1-1:evaders=learned,time_limit=3")
    film = render.play(env, make_policy(PolicyConfig("random"), env.spec), (), jax.random.key(0))
    assert list(film.score) == ["return_pursuers", "return_evaders"]
    assert film.score["return_pursuers"][-1] != film.score["return_evaders"][-1]


def test_the_policy_of_a_film_is_given_its_rewards():
    """The agents move only after their first reward, and both do."""
    env = envs.make("classic/bridge:time_limit=3")

    def act(params, carry, observation, legal_actions, key):
        return jnp.where(carry < 0, 3, 0), jnp.zeros(2), carry

    policy = Policy(lambda: jnp.zeros(2), act, after_step=lambda carry, reward, done: reward)
    film = render.play(env, policy, (), jax.random.key(0))
    begin, paid, after, _ = (np.array(scene.drones) for scene in film.scenes)
    np.testing.assert_array_equal(begin, paid)
    assert (after != paid).any()


def test_a_gif_has_a_frame_for_every_instant(bridge, tmp_path: Path):
    render.save(bridge, tmp_path / "new" / "bridge.gif")
    with Image.open(tmp_path / "new" / "bridge.gif") as film:
        assert film.n_frames == 7
        assert film.info["duration"] == 100
        for number in range(film.n_frames):  # the agents' colours are not lost among the others
            film.seek(number)
            _assert_shows_both_agents(film.convert("RGB"))


@pytest.mark.slow
def test_one_palette_keeps_the_colours_of_whatever_comes_and_goes():
    """A crowd of drones flies over a floor of many shades, and one target appears at the end."""
    env = envs.make("swarm/coverage-8:time_limit=4")
    state = jax.jit(env.reset)(jax.random.key(0))[0]
    scene = jax.tree.map(np.asarray, env.scene(state))
    side = scene.cells.shape
    rng = np.random.default_rng(0)
    places = rng.uniform(1, side[0] - 1, (1, 2))
    scenes = []
    for time in range(4):
        marks = places if time == 1 else np.zeros((0, 2))
        cells = rng.uniform(size=side)
        mark = np.zeros(len(marks), int)
        scenes.append(scene._replace(cells=cells, marks=marks, mark=mark))
    used: set = set()
    playback = render.Playback("crowd", scenes, {"return": np.zeros(4)})
    with Image.open(io.BytesIO(render.to_gif(playback))) as film:
        for number in range(film.n_frames):
            film.seek(number)
            pixels = np.asarray(film.convert("RGB")).reshape(-1, 3).astype(int)
            for colour, visible in ((BLUE, True), (ORANGE, number == 1)):
                near = (np.abs(pixels - np.array(colour)).max(-1) <= 2).sum()
                assert (near > 20) == visible, (number, colour, near)
            used |= set(map(tuple, np.unique(pixels, axis=0).tolist()))
    assert len(used) <= 64


@pytest.mark.parametrize("path", sorted(IMAGES.glob("swarm-*.gif")), ids=lambda path: path.stem)
def test_the_documentation_shows_drones_in_blue(path):
    with Image.open(path) as film:
        for number in range(0, film.n_frames, 20):
            film.seek(number)
            pixels = np.asarray(film.convert("RGB")).reshape(-1, 3).astype(int)
            assert (np.abs(pixels - np.array(BLUE)).max(-1) <= 16).sum() > 50, number


def test_a_picture_shows_both_agents(bridge, tmp_path: Path):
    render.save(bridge, tmp_path / "bridge.png")
    _assert_shows_both_agents(Image.open(tmp_path / "bridge.png"))


def _assert_shows_both_agents(picture) -> None:
    pixels = np.asarray(picture).reshape(-1, 3)
    for colour in (BLUE, ORANGE):
        assert (np.abs(pixels - np.array(colour)).max(-1) <= 2).sum() > 50


def test_other_formats_are_refused(bridge, tmp_path: Path):
    with pytest.raises(OptionError, match=r"ends in \.gif or \.png"):
        render.save(bridge, tmp_path / "bridge.webm")


def test_what_cannot_be_drawn_says_so():
    env = envs.make("probe/one-step")
    policy = make_policy(PolicyConfig("random"), env.spec)
    with pytest.raises(OptionError, match="probe/one-step cannot be drawn"):
        render.play(env, policy, (), jax.random.key(0))


def test_a_quadrotor_shows_its_attitude():
    """Level, nose down by a right angle, and upside down after a roll."""
    half = 0.5**0.5
    attitude = np.array([[1, 0, 0, 0], [half, 0, half, 0], [0, 1, 0, 0]])
    rotors = (render.rotor_places(attitude, np.full((3, 3), 2.0), np.full(3, 0.5)) - 2) / 0.5
    level = np.array([[1, 1, 0], [1, -1, 0], [-1, -1, 0], [-1, 1, 0]])
    np.testing.assert_allclose(rotors[0], level, atol=1e-6)
    np.testing.assert_allclose(rotors[1], level[:, [2, 1, 0]] * [1, 1, -1], atol=1e-6)
    np.testing.assert_allclose(rotors[2], level * [1, -1, 1], atol=1e-6)


# ---------------------------------------------------------------------------------- recordings

NAME = "swarm/coverage-2:time_limit=6"


@pytest.mark.slow
@pytest.mark.bits
def test_episodes_are_done_again_as_they_were_recorded(random_data):
    """The first of a row, one that goes across the chunks of the recording, one that was cut."""
    data, env = vault.open_vault(random_data(NAME)), envs.make(NAME)
    assert data.provenance["recipe"]["chunks"] == [2, 64]
    for number in (0, 10, -1):
        film = render.replay(env, data, range(len(data.episodes.row))[number])
        episode = data.episode(number)
        start = data.episodes.start[number]
        assert number != 10 or start < 64 < start + len(episode.transition.reward)
        assert len(film.scenes) == len(film.score["return"]) == len(episode.transition.reward) + 1
        state = np.concatenate([episode.transition.view.state, episode.final.state[None]])
        position = 2 * np.stack([scene.drones for scene in film.scenes]) / env.side - 1
        recorded = state[:, :8].reshape(-1, 2, 4)[..., :2]
        np.testing.assert_allclose(position, recorded, atol=1e-5)
        np.testing.assert_allclose(
            film.score["return"][-1], data.episodes.returns[number].mean(), rtol=1e-5
        )


@pytest.mark.slow
def test_what_was_drawn_at_random_by_others_is_not_made_up(random_data, tmp_path):
    """A vault made of another does not tell where in the recording its episodes were."""
    later = vault.filter(random_data(NAME), "index > 5", tmp_path / "later.vlt")
    with pytest.raises(OptionError, match=r"later\.vlt.*episode 0, played again, differs"):
        render.replay(envs.make(NAME), later, 0)


@pytest.mark.slow
def test_what_has_no_scene_is_not_drawn(random_data):
    data = vault.open_vault(random_data(NAME))
    with pytest.raises(OptionError, match="episodes of probe/one-step cannot be drawn"):
        render.replay(envs.make("probe/one-step"), data, 0)


@pytest.mark.parametrize(
    ("name", "agents"), [("mpe/simple_tag_v3", 4), ("smax/3m", 6), ("jaxnav:max_steps=2", 2)]
)
def test_environments_of_jaxmarl_have_scenes(name, agents):
    env = envs.make(f"jaxmarl/{name}")
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    scene = jax.device_get(env.scene(state))
    assert scene.drones.shape == (agents, 2) and scene.alive.all()
    assert ((scene.drones >= 0) & (scene.drones <= scene.side)).all()
    assert sorted(set(scene.team.tolist())) == ([0] if "jaxnav" in name else [0, 1])
    picture = render.frame(render.Playback(name, [scene], {"return": np.zeros(1)}), 0)
    assert len(picture.getcolors(1 << 20)) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["jumanji/lbf:time_limit=3", "jumanji/multi_cvrp", "jaxmarl/overcooked/coord_ring"]
)
def test_environments_that_draw_by_themselves_have_a_picture_of_every_state(name, tmp_path):
    env = envs.make(name)
    states = [jax.jit(env.reset)(jax.random.key(seed))[0] for seed in (0, 1, 1)]
    scenes = [jax.device_get(env.scene(state)) for state in states]
    images = env.pictures(scenes)
    assert len(images) == 3 and {image.shape for image in images} == {images[0].shape}
    assert images[0].dtype == np.uint8 and images[0].shape[-1] == 3
    np.testing.assert_array_equal(images[1], images[2])
    film = render.Playback(name, scenes, {"return": np.zeros(3)}, env.pictures)
    assert render.frame(film, 0) != render.frame(film, 1) == render.frame(film, 1)
    render.save(film, tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as gif:
        assert np.asarray(gif.convert("RGB")).std() > 5


def test_a_side_is_drawn_if_its_environment_is():
    for name, drawn in (("classic/bridge", True), ("probe/match", False)):
        env = envs.make(name)
        side = sides.Side(env, Team("agent_0", (0,)), (), ())
        assert hasattr(side, "scene") is drawn and not hasattr(side, "pictures")
