"""Recorded episodes are played again, or an error says why they cannot be."""

import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.errors import OptionError
from offmarl.report import render

NAME = "swarm/coverage-2:time_limit=6"


@pytest.mark.slow
@pytest.mark.bits
def test_episodes_are_done_again_as_they_were_recorded(random_data):
    """The first of a row, one that goes across the chunks of the recording, one that was cut."""
    data, env = vault.open_vault(random_data(NAME)), envs.make(NAME)
    assert data.provenance["recipe"]["chunks"] == [2, 64]
    for number in (0, 10, -1):
        shown = render.replay(env, data, range(len(data.episodes.row))[number])
        episode = data.episode(number)
        start = data.episodes.start[number]
        assert number != 10 or start < 64 < start + len(episode.transition.reward)
        assert len(shown.scenes) == len(shown.score) == len(episode.transition.reward) + 1
        state = np.concatenate([episode.transition.view.state, episode.final.state[None]])
        position = 2 * np.stack([scene.drones for scene in shown.scenes]) / env.side - 1
        recorded = state[:, :8].reshape(-1, 2, 4)[..., :2]
        np.testing.assert_allclose(position, recorded, atol=1e-5)
        np.testing.assert_allclose(shown.score[-1], data.episodes.returns[number].mean(), rtol=1e-5)


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
