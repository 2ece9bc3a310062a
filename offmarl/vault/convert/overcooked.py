"""Games of Overcooked that humans played, as overcooked-ai 1.1.0 ships them (Carroll et al. 2019).

A pickle holds a frame of pandas with a row for each step: ``run`` and ``workerid_num``, which name
a pair of players, ``layout_name``, ``joint_action``, ``reward``, ``state`` and ``next_state``. In
each kitchen a pair played once. A delivery is worth 5 there, and 20 in JaxMARL.
"""

import gzip
import io
import json
import pickle
import pickletools
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offmarl import envs
from offmarl.errors import OptionError, VaultError
from offmarl.paths import local
from offmarl.types import EnvSpec
from offmarl.vault.convert import containers
from offmarl.vault.convert.admission import ImportedRow
from offmarl.vault.convert.common import Imported, origin_of
from offmarl.vault.convert.games import Game, compare, play_again
from offmarl.vault.format.layout import NumpyArray

_KITCHENS = {
    "asymmetric_advantages": "asymm_advantages",
    "coordination_ring": "coord_ring",
    "cramped_room": "cramped_room",
    "random0": "forced_coord",
    "random3": "counter_circuit",
}
_KEYS = ("layout_name", "run", "workerid_num")
_COLUMNS = (*_KEYS, "state", "next_state", "joint_action", "reward")
_ACTIONS = [[0, -1], [0, 1], [1, 0], [-1, 0], [0, 0], "INTERACT"]
"""In JaxMARL's order; the first four are also the directions that players face."""
_CHANNELS = [*range(10), 16, 18, 20, 21, 22, 23]
"""Those of observations that change in a game; see JaxMARL's ``Overcooked.get_obs``."""
_MOST_BYTES = 2**30
"""Of an unpacked archive; overcooked-ai 1.1.0 has 53 MiB of pickles."""


@contextmanager
def read_overcooked(
    source: containers.StrPath, env_spec: EnvSpec | None = None
) -> Iterator[Imported]:
    """Read human games of Overcooked from overcooked-ai 1.1.0: its sdist, a folder, or a pickle."""
    path = local(source)
    readable = partial(containers.readable, path)
    games, states = [], []
    with readable():
        rows = _rows(path)
        env, pairs = _choose(path, rows, env_spec)
        for number, (name, index) in enumerate(sorted(pairs.items())):
            log = {column: rows[column][index] for column in _COLUMNS}
            states.append(_parse([*log["state"][:1], *log["next_state"]]))
            players = states[-1][0]["players"]
            places = np.array([player["position"] for player in players], np.uint32)
            directions = np.array([_ACTIONS.index(x["orientation"]) for x in players], np.int32)
            joint = [[*map(_ACTIONS.index, actions)] for actions in _parse(log["joint_action"])]
            ids = 2 * number, 2 * number + 1
            games.append(Game(name, (places, directions), np.array(joint, np.int32), ids))

    def records() -> Iterator[ImportedRow]:
        replayed = play_again(env, partial(_begin, env), games)
        for game, record, state in zip(games, replayed, states, strict=True):
            with readable():
                _check(game, record, state, rows["reward"][pairs[game.name]])
            yield record

    names = [f"{game.name}/{agent}" for game in games for agent in env.spec.agents]
    policies = [{"policy_id": number, "name": name} for number, name in enumerate(names)]
    origin = origin_of("overcooked-ai", path)
    yield Imported(env.spec, origin, records(), len(games), policies=policies)


class _Built:
    """Stands for any object of pandas or NumPy: keeps its arguments and its state."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Frames(pickle.Unpickler):
    """Reads frames of pandas as stand-ins: nothing that a file names is imported or run."""

    def find_class(self, module: str, name: str) -> type[_Built]:
        """Return the stand-in; `VaultError` for the names of other packages."""
        if module.partition(".")[0] in ("numpy", "pandas"):
            return _Built
        raise VaultError(
            f"its pickle has an object of {module}.{name}, and only pandas' and NumPy's are read. "
            "Nothing of it was run: use the file of overcooked-ai 1.1.0."
        )


def _load(data: bytes) -> Any:
    """Unpickle a frame; the unpickler reserves as much memory as a file asks for, if it may."""
    for count, (opcode, number, _) in enumerate(pickletools.genops(data)):
        if opcode.name.endswith("PUT") and number is not None and number > count:
            raise pickle.UnpicklingError(f"a place {number} of {count} in its table")
    return _Frames(io.BytesIO(data)).load()


def _array(built: Any) -> NumpyArray:
    _, shape, dtype, fortran, data = built.state
    if isinstance(data, list):
        values = np.fromiter(data, object, len(data))
    else:
        (kind,) = (x for x in ("i8", "f8", "b1") if x == dtype.arguments[0])
        values = np.frombuffer(data, f"<{kind}")
    return values.reshape(shape, order="F" if fortran else "C")


def _pickles(path: Path) -> list[bytes]:
    """Return the pickles in an archive or a folder, or the one at the path."""
    if path.is_dir():
        containers.check_links_stay_inside(path)
        return [file.read_bytes() for file in sorted(path.rglob("*.pickle"))]
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_packed else path.open("rb") as content:
        data = content.read(_MOST_BYTES + 1)  # a small file may unpack to a huge one
    excess = VaultError(f"{path} holds more than {_MOST_BYTES >> 20} MiB.")
    if len(data) > _MOST_BYTES:
        raise excess
    try:
        archive = tarfile.TarFile(fileobj=io.BytesIO(data))
    except tarfile.ReadError:
        return [data]
    with archive:
        entries = []
        for entry in archive:
            entry.pax_headers = {}  # each has a copy of those that all have in common
            if entry.size < 0:  # the next one would be an earlier one
                raise ValueError(f"it has a file of {entry.size} bytes")
            if entry.isfile() and entry.name.endswith(".pickle"):
                entries.append(entry)
        if sum(entry.size for entry in entries) > _MOST_BYTES:  # they may say any size
            raise excess
        return [pickled.read() for x in entries if (pickled := archive.extractfile(x))]


def _rows(path: Path) -> dict[str, NumpyArray]:
    """Return the columns of all frames in an archive or a folder, or of one pickle."""
    columns: dict[str, list[NumpyArray]] = {}
    for data in _pickles(path):
        frame = _load(data).state["_data"].state[3]["0.14.1"]
        names = _array(frame["axes"][0].arguments[1]["data"])
        for block in frame["blocks"]:
            places, values = _array(block["mgr_locs"]), _array(block["values"])
            for name, column in zip(names[places], values, strict=True):
                for column_name in (x for x in _COLUMNS if x == name):
                    columns.setdefault(column_name, []).append(column)
    containers.check_layout(path, "overcooked-ai's", columns, _COLUMNS)
    rows = {name: np.concatenate(columns[name]) for name in _COLUMNS}
    for name, values in rows.items():  # the text of nested lists may be larger than any memory
        if values.dtype == object and not all(isinstance(x, str) for x in values):
            raise VaultError(f"the column {name} in {path} holds objects that are not text.")
    return rows


def _choose(
    path: Path, rows: dict[str, NumpyArray], spec: EnvSpec | None
) -> tuple[Any, dict[str, list[int]]]:
    """Return an environment and the rows of each game in it, by the pair that played."""
    kitchens: dict[str, dict[str, list[int]]] = {}
    for row, (kitchen, run, pair) in enumerate(zip(*(rows[key] for key in _KEYS), strict=True)):
        if kitchen not in _KITCHENS:
            names = ", ".join(_KITCHENS)
            raise VaultError(f"JaxMARL has no kitchen {kitchen!r}: give games in {names} alone.")
        name = f"jaxmarl/overcooked/{_KITCHENS[kitchen]}"
        kitchens.setdefault(name, {}).setdefault(f"{run}/pair-{pair}", []).append(row)
    limits = {name: max(map(len, games.values())) for name, games in sorted(kitchens.items())}
    env_name = spec.name if spec else ""
    kitchen = env_name.partition(":")[0]
    if spec is None or (spec.time_limit or 0) < limits.get(kitchen, np.inf):
        names = " or ".join(f"{name}:max_steps={limit}" for name, limit in limits.items())
        raise OptionError(
            f"a vault has one environment, as long as the games of {path.name}: give --env {names}."
        )
    return envs.make(env_name), kitchens[kitchen]


def _parse(texts: Iterable[str]) -> Any:
    """Parse states or actions from their printed form."""
    text = ",".join(texts).replace("'", '"').replace("False", "false").replace("True", "true")
    return json.loads(f"[{text}]")


def _begin(env: Any, start: Any) -> Any:
    """Start an episode where the players stood, which in some kitchens is not where cooks do."""
    import jax
    from jaxmarl.environments.overcooked.common import DIR_TO_VEC

    (x, y), ways, cooks = start[0].T, start[1], copy(env.wrapped)
    cooks.layout = {**cooks.layout, "agent_idx": y * cooks.width + x}
    _, state = cooks.reset(jax.random.key(0))
    pad = (state.maze_map.shape[0] - cooks.height) // 2
    cells = state.maze_map.at[pad + y, pad + x, 2].set(ways.astype(state.maze_map.dtype))
    state = state.replace(agent_dir_idx=ways, agent_dir=DIR_TO_VEC[ways], maze_map=cells)
    return env.begin(cooks.get_obs(state), state)


def _check(game: Game, record: ImportedRow, states: list[Any], rewards: NumpyArray) -> None:
    """Compare agent_0's observations, and the rewards, with the recorded states and rewards."""
    after: Any = record.after
    views = np.concatenate([record.steps.view.observation[0, :1], after.observation[0]])[:, 0]
    recorded = views.copy()
    recorded[..., _CHANNELS] = 0
    for cells, state in zip(recorded, states, strict=True):
        items = [*state["objects"].values()]
        for seat, player in enumerate(state["players"]):
            x, y = player["position"]
            cells[y, x, [seat, 2 + 4 * seat + _ACTIONS.index(player["orientation"])]] = 1
            items += [player["held_object"]] if "held_object" in player else []
        for item in items:
            (x, y), (_, onions, cooked) = item["position"], item.get("state", ("", 1, 0))
            if cooked:  # in a pot or on a dish; it takes 20 steps
                cells[y, x, [18, 20, 21]] = onions, max(20 - cooked, 0), cooked >= 20
            else:
                cells[y, x, {"soup": 16, "dish": 22, "onion": 23}[item["name"]]] = onions
    compare(game, "agent_0's observation at [row, column, channel]", views, recorded)
    compare(game, "the reward", record.steps.reward[0, :, 0], 4 * rewards)
