"""Reports of images, trees and extras."""

import numpy as np
import pytest

from offmarl import report, vault
from offmarl.report.contents import data_warnings
from offmarl.testing import image_spec, typed_spec
from offmarl.types import map_tree
from tests.vault.experience import make

SPECS = {"tree": typed_spec("test/typed"), "image": image_spec("test/image")}


def write(path, spec, transition, finals):
    with vault.create(path, spec, rows=2) as writer:
        writer.append(transition, finals)
    return vault.open_vault(path)


@pytest.mark.parametrize("name", SPECS)
def test_a_survey_pools_the_entries_of_each_leaf(tmp_path, name):
    spec = SPECS[name]
    transition, finals = make(spec, steps=40)
    alive = np.ones_like(transition.view.alive)
    transition = transition._replace(view=transition.view._replace(alive=alive))
    found = report.survey(write(tmp_path / "a.vlt", spec, transition, finals))
    leaves = [*vault_leaves(transition.view.observation)]
    expected = np.array([[np.float64(leaf).mean() for leaf in leaves]])
    np.testing.assert_allclose(found.observations.mean, expected, rtol=1e-5, atol=1e-6)
    spread = np.array([[np.float64(leaf).std() for leaf in leaves]])
    np.testing.assert_allclose(found.observations.std, spread, rtol=1e-5)
    assert found.observations.low.tolist() == [[float(leaf.min()) for leaf in leaves]]
    assert found.state.low.shape == (len(spec.state_leaves) if spec.state_size else 0,)
    assert found.coverage.local_pairs == 160


def vault_leaves(tree):
    """The leaves of a tree, in the order of their names."""
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from vault_leaves(tree[name])
    else:
        yield tree.astype(np.float32)


def test_warnings_name_leaves(tmp_path):
    transition, finals = make(SPECS["tree"], steps=40)
    observation = map_tree(np.copy, transition.view.observation)
    observation["gear"][:] = 3
    transition = transition._replace(view=transition.view._replace(observation=observation))
    found = report.survey(write(tmp_path / "a.vlt", SPECS["tree"], transition, finals))
    assert "Constant features of the observation: gear." in list(data_warnings(found))
