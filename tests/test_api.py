"""Commands as functions, and what notebooks show of their results."""

from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import envs, errors
from offmarl.cli.data import ls
from offmarl.networks import PolicyConfig, make_policy
from tests.runs import write_run


@pytest.fixture
def vault(tmp_path, monkeypatch):
    """Return a small vault of random play, with its directory as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFMARL_QUIET", "1")
    env = envs.make("classic/xor")
    policy = make_policy(PolicyConfig("random"), env.spec)
    paths = offmarl.record_tiers(env, policy, {"random": ()}, steps=64, num_envs=4, out="v")
    return paths["random"].relative_to(tmp_path)


class Texts(HTMLParser):
    """Collects the texts of a page, and its tags."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.tags = [], set()
        self.feed(page)

    def handle_data(self, data):
        self.texts.append(data)

    def handle_starttag(self, tag, _attributes):
        self.tags.add(tag)


def test_tiers_of_own_policies_are_recorded_side_by_side(vault):
    assert vault.as_posix() == "v/classic/xor.vlt/random"
    data = offmarl.open(vault)
    assert data.num_steps == 64 and data.provenance["tier"] == "random"


def test_datasets_are_listed_as_by_the_command(vault):
    (entry,) = offmarl.list_datasets("v")
    assert entry == ls("v").data["vaults"][0] and entry["env"] == "classic/xor"
    assert offmarl.list_datasets("v", agents=9) == []
    names = [row["name"] for row in offmarl.list_datasets(Path(), remote=True, env="smac_v1/3m")]
    assert names and all("3m" in name for name in names)


@pytest.mark.slow
def test_a_program_is_trained_by_its_options(vault):
    options = {"updates": 2, "eval_episodes": 2, "final_episodes": 2, "hidden": 4, "batch_size": 4}
    run = offmarl.train("bc", str(vault), out="runs/bc", **options)
    assert run.record["args"]["hidden"] == 4 and run.record["complete"]
    dataset = offmarl.open(vault)
    assert offmarl.train("bc", dataset, out="runs/bc", **options).record == run.record
    result = offmarl.compare(run, references={"classic/xor": (0.0, 50.0)})
    ((_, rows),) = result.comparison.datasets.items()
    assert rows[0].entry.algorithm == "bc" and rows[0].normalised is not None
    assert "bc on" in "".join(Texts(run._repr_html_()).texts)


@pytest.mark.parametrize(
    ("program", "options", "kind"),
    [
        ("no_such", {}, errors.UnknownNameError),
        ("bc", {"updatess": 2}, errors.OptionError),
        ("bc", {"updates": "many"}, errors.OptionError),
    ],
)
def test_what_a_program_does_not_take_is_refused(vault, program, options, kind):
    with pytest.raises(kind):
        offmarl.train(program, vault, **options)
    with pytest.raises(errors.OptionError, match=r"<Subset: 1 of .* has none: give"):
        offmarl.train("bc", offmarl.open(vault).subset([0]))


def test_comparisons_are_shown_and_their_names_are_text(tmp_path):
    runs = [write_run(tmp_path / name, name, "<b>/x", [[1, 2], [3, 4]]) for name in ("bc", "maicq")]
    page = Texts(offmarl.compare(*runs, str(runs[0]))._repr_html_())
    assert "b" not in page.tags and "Episode return: <b>/x" in page.texts
    assert "2.500 *" in page.texts and "maicq (greedy)" in page.texts


def test_datasets_and_episodes_are_shown(vault):
    data = offmarl.open(vault)
    texts = Texts(data._repr_html_()).texts
    assert texts[texts.index("environment") + 1] == "classic/xor"
    assert texts[texts.index("steps") + 1] == "64" and "mean return" in texts
    assert "classic/xor, 2 agents" in repr(data)
    assert repr(data[0]).startswith("<Episode of ") and len(repr(data[0])) < 40
    episode = Texts(data[0]._repr_html_())
    assert "Episode of " in episode.texts[0] and "observation" in episode.texts


def test_batches_of_jax_become_tensors_that_share_their_memory():
    torch = pytest.importorskip("torch")
    from offmarl.replay.torch import to_tensors

    batch = {"x": jnp.arange(6.0).reshape(2, 3), "flag": jnp.array([True, False]), "none": None}
    batch["half"] = jnp.ones(2, jnp.bfloat16)
    tensors = to_tensors(batch)
    np.testing.assert_array_equal(tensors["x"], batch["x"])
    assert tensors["x"].data_ptr() == batch["x"].unsafe_buffer_pointer()
    assert tensors["flag"].dtype == torch.bool and tensors["half"].dtype == torch.bfloat16
    assert tensors["none"] is None and jax.tree.structure(tensors) == jax.tree.structure(batch)
