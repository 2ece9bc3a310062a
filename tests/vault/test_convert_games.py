"""Human games of other projects, played again: overcooked-ai's pickles and AH2AC2's safetensors."""

import copyreg
import gzip
import io
import os
import pickle
import resource
import struct
import sys
import tarfile
from types import ModuleType

import jax
import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.errors import OptionError, VaultError
from offmarl.vault.convert import overcooked
from tests.conftest import PUBLISHED

pytest.importorskip("jaxmarl")

KITCHEN = "jaxmarl/overcooked/cramped_room:max_steps=60"
ACTIONS = [[0, -1], [0, 1], [1, 0], [-1, 0], [0, 0], "INTERACT"]
TURNS = {"^": 0, "v": 1, ">": 2, "<": 3, ".": 4, "i": 5}
COOK = ">i<^i" * 3 + "v" + "." * 30
WAITER = "vi" + "." * 12 + ".^>^" + "." * 18 + "i>vvi" + "....."
"""The first player cooks three onions, and the second delivers them on a dish."""


# ---------------------------------------------------------------------------------- overcooked-ai


def state_of(grid):
    """Return a state as overcooked-ai prints it, from what agent_0 observes in JaxMARL."""
    players, objects = [], {}
    for seat in range(2):
        (y,), (x,) = np.nonzero(grid[..., seat])
        way = int(grid[y, x, 2 + 4 * seat : 6 + 4 * seat].argmax())
        players.append({"position": [int(x), int(y)], "orientation": ACTIONS[way]})
    for y, x in np.argwhere(grid[..., [16, 18, 22, 23]].any(-1)).tolist():
        cell, item = grid[y, x], {"position": [x, y]}
        if cell[22] or cell[23]:
            item["name"] = "dish" if cell[22] else "onion"
        else:
            cooked = 20 - int(cell[20]) if cell[18] else 0
            item |= {"name": "soup", "state": ["onion", int(cell[16] or cell[18]), cooked]}
        holder = [player for player in players if player["position"] == [x, y]]
        for player in holder:
            player["held_object"] = item
        if not holder:
            objects[f"{x},{y}"] = item
    return str({"players": players, "objects": objects, "pot_explosion": False})


@pytest.fixture(scope="module")
def table():
    """The columns of one game of 46 steps, which a pair begins where it stands after a step."""
    env = envs.make(KITCHEN)
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    # JaxMARL starts at (1, 1) and (3, 1), and these players at (3, 1) and (1, 2).
    moves = [TURNS[x] for x in WAITER], [TURNS[x] for x in COOK]
    step, grids, rewards = jax.jit(env.step), [], []
    state, after = step(jax.random.key(0), state, np.array([1, 2]))
    for joint in zip(*moves, strict=False):
        grids.append(after.view.observation[0])
        state, after = step(jax.random.key(0), state, np.array(joint))
        rewards.append(after.reward[0] / 4)
    states = [state_of(np.asarray(grid)) for grid in (*grids, after.view.observation[0])]
    length = len(rewards)
    return {
        "layout_name": np.array(["cramped_room"] * length, object),
        "run": np.array(["run-1"] * length, object),
        "workerid_num": np.full(length, 3),
        "joint_action": np.array(
            [str([ACTIONS[x] for x in joint]) for joint in zip(*moves, strict=False)], object
        ),
        "reward": np.array(rewards, float),
        "state": np.array(states[:-1], object),
        "next_state": np.array(states[1:], object),
    }


class Frame:
    """Pickled as pandas 1.0 pickles a frame."""

    def __init__(self, columns):
        self.columns = columns

    def pickled(self, monkeypatch):
        modules = {
            "pandas": "",
            "pandas.core.frame": "DataFrame",
            "pandas.core.indexes.base": "Index",
            "pandas.core.internals.managers": "BlockManager",
        }
        kinds = {}
        for module, name in modules.items():
            fake = ModuleType(module)
            if name:
                kinds[name] = type(name, (), {"__module__": module, "__reduce__": reduce})
                setattr(fake, name, kinds[name])
            monkeypatch.setitem(sys.modules, module, fake)
        base = sys.modules["pandas.core.indexes.base"]
        base._new_Index = new_index
        monkeypatch.setattr(new_index, "__module__", "pandas.core.indexes.base")
        names = kinds["Index"]()
        names.parts = new_index, (kinds["Index"], {"data": np.array([*self.columns], object)})
        blocks = [
            {"values": np.stack([x]), "mgr_locs": np.array([number])}
            for number, x in enumerate(self.columns.values())
        ]
        manager, frame = kinds["BlockManager"](), kinds["DataFrame"]()
        about = {"0.14.1": {"axes": [names], "blocks": blocks}}
        manager.parts = copyreg.__newobj__, (kinds["BlockManager"],), ([], [], [], about)
        frame.parts = copyreg.__newobj__, (kinds["DataFrame"],), {"_data": manager}
        return pickle.dumps(frame, protocol=4)


def reduce(self):
    return self.parts


def new_index(kind, data): ...


new_index.__name__ = new_index.__qualname__ = "_new_Index"


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Convert a pickle of some columns."""

    def convert(columns, env=KITCHEN, name="games.pickle"):
        data = columns if isinstance(columns, bytes) else Frame(columns).pickled(monkeypatch)
        (tmp_path / name).write_bytes(data)
        spec = env and envs.make(env).spec
        out = tmp_path / "humans.vlt"
        return vault.import_dataset(tmp_path / name, out, "overcooked-ai", env_spec=spec)

    return convert


def test_a_game_is_played_again_step_by_step(convert, table, tmp_path):
    dataset = convert(table)
    steps = dataset.episode(0).transition
    assert dataset.episodes.length.tolist() == [46] and dataset.episodes.cause.tolist() == ["cut"]
    assert steps.reward.sum(0).tolist() == [20.0, 20.0]
    assert steps.reward[:, 0].tolist() == (4 * table["reward"]).tolist()
    states = [state_of(grid) for grid in steps.view.observation[:, 0]]
    assert states == table["state"].tolist()
    assert state_of(dataset.episode(0).final.observation[0]) == table["next_state"][-1]
    human = {"policy_id": 1, "name": "run-1/pair-3/agent_1"}
    assert dataset.provenance["policies"][1] == human
    subset = vault.filter(dataset, 'policy_agent_1 == "run-1/pair-3/agent_1"', tmp_path / "b.vlt")
    assert subset.num_steps == 46


@pytest.mark.slow
def test_archives_and_folders_are_searched_for_pickles(table, tmp_path, monkeypatch):
    data = Frame(table).pickled(monkeypatch)
    (tmp_path / "package" / "data").mkdir(parents=True)
    (tmp_path / "package" / "data" / "a.pickle").write_bytes(data)
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    spec = envs.make(KITCHEN).spec
    first, second = (
        vault.import_dataset(path, path.with_suffix(".vlt"), "overcooked-ai", env_spec=spec)
        for path in (tmp_path / "package", tmp_path / "package.tar.gz")
    )
    assert first.digest() == second.digest() and first.num_steps == 46


def changed(table, column, step, value):
    copy = table[column].copy()
    copy[step] = value if not callable(value) else value(copy[step])
    return table | {column: copy}


@pytest.mark.parametrize(
    ("column", "step", "value", "message"),
    [
        ("reward", 5, 5.0, r"at step 5: the reward is 0.0, and 20.0 in the file"),
        (
            "next_state",
            10,
            lambda text: text.replace("'onion', 2", "'onion', 1"),
            r"at step 11: agent_0's observation at .* \[0, 2, 16\] is 2, and 1 in the file",
        ),
    ],
)
def test_a_replay_that_differs_names_game_step_and_values(
    convert, table, tmp_path, column, step, value, message
):
    with pytest.raises(VaultError, match=rf"game run-1/pair-3 differs .* {message}"):
        convert(changed(table, column, step, value))
    assert not (tmp_path / "humans.vlt").exists()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_pickle_of_another_class_runs_nothing(convert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VaultError, match=r"an object of posix.mkdir, and only .* Nothing of it"):
        convert(pickle.dumps(Evil()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "asked",
    [
        pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**27),  # a place in a table
        pickle.BYTEARRAY8 + struct.pack("<Q", 2**30),
        pickle.BINBYTES8 + struct.pack("<Q", 2**62),
    ],
)
def test_a_pickle_does_not_get_the_memory_that_it_asks_for(convert, asked):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(VaultError, match="another format"):
        convert(asked + pickle.STOP)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_nested_lists_are_not_taken_for_text(convert, table):
    nested: list = []
    for _ in range(60):
        nested = [nested, nested]
    for column in ("run", "layout_name", "next_state"):
        names = np.empty(46, object)
        names[:] = [nested] * 46
        with pytest.raises(VaultError, match=f"the column {column} .* objects that are not text"):
            convert(table | {column: names})


SPARSE = {
    "GNU.sparse.major": "0",
    "GNU.sparse.minor": "1",
    "GNU.sparse.size": str(2**45),
    "GNU.sparse.map": "0,0",
    "GNU.sparse.numblocks": "1",
}


@pytest.mark.parametrize("headers", [SPARSE, {"comment": "x" * 2**20}], ids=["sparse", "header"])
def test_a_small_archive_that_unpacks_to_much_is_refused(convert, monkeypatch, headers):
    monkeypatch.setattr(overcooked, "_MOST_BYTES", 2**20)
    header, packed = tarfile.TarInfo("a.pickle"), io.BytesIO()
    header.pax_headers = headers
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(header)
    with pytest.raises(VaultError, match=r"holds more than 1 MiB|layout: it has no"):
        convert(packed.getvalue(), name="a.tar.gz")


def test_other_files_are_refused_in_a_line(convert, table, monkeypatch):
    data = Frame(table).pickled(monkeypatch)
    packed = gzip.compress(data)[:-200]
    for wrong in (data[:-200], data[:9], b"", b"text", pickle.dumps([1]), pickle.dumps({}), packed):
        with pytest.raises(VaultError, match=r"damaged, incomplete or of another format") as error:
            convert(wrong)
        assert "\n" not in str(error.value)
    without = {name: x for name, x in table.items() if name != "next_state"}
    with pytest.raises(VaultError, match="overcooked-ai's layout: it has no next_state"):
        convert(without)
    with pytest.raises(VaultError, match="another format"):
        convert(changed(table, "next_state", 3, "{'players': []}"))


@pytest.mark.parametrize(
    "env", [None, "jaxmarl/overcooked/coord_ring", "jaxmarl/overcooked/cramped_room:max_steps=45"]
)
def test_the_environment_is_that_of_the_games_and_lasts_as_long(convert, table, env):
    with pytest.raises(
        OptionError, match="give --env jaxmarl/overcooked/cramped_room:max_steps=46"
    ):
        convert(table, env)


def test_a_kitchen_that_jaxmarl_lacks_is_named(convert, table):
    with pytest.raises(VaultError, match="no kitchen 'marshmallow': give games in asymmetric"):
        convert(table | {"layout_name": np.array(["marshmallow"] * 46, object)})


@pytest.mark.nightly
def test_no_step_of_the_76_games_differs(tmp_path):
    source = PUBLISHED / "overcooked_ai-1.1.0.tar.gz"
    if not source.exists():
        pytest.skip("needs the sdist of overcooked-ai in ../shared/data")
    counts = np.zeros(3)
    for name in (
        "asymm_advantages",
        "coord_ring",
        "counter_circuit",
        "cramped_room",
        "forced_coord",
    ):
        spec = envs.make(f"jaxmarl/overcooked/{name}", max_steps=1204).spec
        data = vault.import_dataset(
            source, tmp_path / f"{name}.vlt", "overcooked-ai", env_spec=spec
        )
        counts += len(data.episodes.row), data.num_steps, data.episodes.returns[:, 0].sum() / 20
    assert counts.tolist() == [76, 91_102, 1_363]


# ---------------------------------------------------------------------------------- AH2AC2


@pytest.fixture(scope="module")
def hanabi():
    """Three games of legal actions at random; the last was given up."""
    env = envs.make("jaxmarl/hanabi")
    rng, step = np.random.default_rng(0), jax.jit(env.step)
    cards = np.stack(np.divmod(np.repeat(np.arange(25), [3, 2, 2, 2, 1] * 5), 5), -1)
    actions: np.ndarray = np.full((3, 89, 2), env.spec.num_actions - 1, np.int32)
    decks, lengths, scores = [], [], []
    for game, most in enumerate((89, 89, 5)):
        decks.append(rng.permutation(cards))
        state, after = env.begin(*env.wrapped.reset_from_deck_of_pairs(decks[-1]))
        count, score = 0, 0.0
        while count < most and not after.last:
            chances = np.asarray(after.view.legal_actions, float)
            chances[:, 5:10] = 0 if chances[:, 10:20].any() else chances[:, 5:10]  # bombs are rare
            joint = [rng.choice(len(row), p=row / row.sum()) for row in chances]
            actions[game, count] = joint
            state, after = step(jax.random.key(0), state, np.array(joint))
            count, score = count + 1, score + float(after.reward[0])
        lengths.append(count)
        scores.append(score)
    numbers = {"game_ids": [7, 8, 9], "scores": scores, "num_actions": lengths, "num_players": 2}
    arrays = {name: np.array(x, np.int32) for name, x in numbers.items()}
    return arrays | {"actions": actions, "decks": np.array(decks, np.int32)}


def read_hanabi(tmp_path, arrays):
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "games.safetensors"
    path.write_bytes(arrays if isinstance(arrays, bytes) else numpy.save(arrays))
    return vault.import_dataset(path, tmp_path / "h.vlt", "ah2ac2")


def test_games_of_hanabi_are_played_again(tmp_path, hanabi):
    data = read_hanabi(tmp_path, hanabi)
    assert data.spec.name == "jaxmarl/hanabi" and data.provenance["source"]["games"] == [7, 8, 9]
    assert data.episodes.length.tolist() == hanabi["num_actions"].tolist()
    assert data.episodes.cause.tolist() == ["terminated", "terminated", "cut"]
    assert data.episodes.returns[:, 0].tolist() == hanabi["scores"].tolist()
    for number, length in enumerate(hanabi["num_actions"]):
        actions = data.episode(number).transition.action
        assert (actions == hanabi["actions"][number, :length]).all()


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("scores", 1, 24, r"game 8 differs .* step \d+: the score is \d+.0, and 24"),
        (
            "actions",
            (0, 2, 0),
            77,
            r"game 7 differs .* step 2: an agent's action \[0\] is \d+, and 77",
        ),
        ("num_actions", 0, 88, r"game 7 differs .* step \d+: the end is True, and False"),
        ("num_actions", 0, 0, "not of AH2AC2's layout: .* or games that are empty"),
        ("num_actions", 0, 90, "not of AH2AC2's layout: .* or longer than its actions"),
        ("num_players", (), 3, r"not of AH2AC2's layout: .* actions int32\(3, 89, 2\)"),
    ],
)
def test_a_game_of_hanabi_that_differs_is_named(tmp_path, hanabi, name, at, value, message):
    wrong = hanabi[name].copy()
    wrong[at] = value
    with pytest.raises(VaultError, match=message):
        read_hanabi(tmp_path, hanabi | {name: wrong})


def test_files_of_other_layouts_are_refused(tmp_path, hanabi):
    numpy = pytest.importorskip("safetensors.numpy")
    data = numpy.save(hanabi)
    for wrong in (data[:-9], data[:20], b"", b"text of some length"):
        with pytest.raises(VaultError, match="damaged, incomplete or of another format"):
            read_hanabi(tmp_path, wrong)
    for name in ("num_players", "num_actions", "decks", "actions"):
        with pytest.raises(VaultError, match=f"AH2AC2's layout: .*{name} float32"):
            read_hanabi(tmp_path, hanabi | {name: hanabi[name].astype(np.float32)})
    with pytest.raises(VaultError, match="AH2AC2's layout: it has no decks"):
        read_hanabi(tmp_path, {name: x for name, x in hanabi.items() if name != "decks"})
