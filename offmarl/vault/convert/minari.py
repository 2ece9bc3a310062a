"""Minari datasets: of several agents, which keep their axis, and of a single agent as N = 1."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from offmarl import gate
from offmarl.errors import OptionError, VaultError
from offmarl.gate import to_unit_range
from offmarl.paths import expand_user
from offmarl.terminal import Progress
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    Episode,
    FinalObservations,
    flatten_tree,
    map_tree,
)
from offmarl.vault.convert.admission import ImportedRow, to_steps
from offmarl.vault.convert.common import Imported, check_spec, count_items, with_final
from offmarl.vault.convert.containers import (
    HDF5,
    SteadyFile,
    StrPath,
    check_links_stay_inside,
    open_hdf5,
    plain_dtype,
    readable,
    require,
    written_whole,
)
from offmarl.vault.dataset import Dataset
from offmarl.vault.format import layout
from offmarl.vault.format.layout import DISK_NAMES, NumpyArray, disk_name_of
from offmarl.vault.format.tables import CAUSES, CUT, OPEN

_SPEC = re.compile(r"offmarl:(\{.*\})", re.DOTALL)
_PER_STEP = ("reward", "terminated", "truncated", "behaviour_log_prob", "policy_id")
"""Fields of transitions that are infos."""


def write_minari(vault: Dataset, dataset: StrPath, progress: Progress) -> Path:
    """Write a local Minari dataset, where agents keep their axis.

    Observations are boxes ``(N, O)`` or ``(N, ...)``, or dictionaries of them, in their own types
    (but bfloat16 becomes float32, and bool uint8). Actions are ``(N,)`` or ``(N, A)``, and the
    reward is the mean over the team. States, legal actions, the rewards and ends of each agent, and
    extras are in ``infos``. Minari requires a final view. An episode without one, as most foreign
    episodes are, repeats its last view, and ``infos`` says so.
    """
    storage = require("minari.dataset.minari_storage").MinariStorage
    name = PurePath(dataset).as_posix()
    home = _home()
    _register(name)
    with written_whole(home / name) as part:
        part.mkdir()
        # `create_dataset_from_buffers` would write to the final place, and leave a dataset of fewer
        # episodes there if it is killed.
        data = storage.new(part / "data", *_spaces(vault.spec))
        data.update_metadata(
            {
                "dataset_id": name,
                "minari_version": require("minari").__version__,
                "description": f"offmarl:{layout.dump_json(vault.spec.to_json()).decode()}",
            }
        )
        with SteadyFile(data._file_path, "w+") as file:
            data._file_path = file  # what Minari gives to h5py
            data.update_episodes(_buffers(vault, file, progress))
    return home / name


def _home() -> Path:
    """Return the directory of Minari's local datasets; `VaultError` if it cannot be made."""
    home = expand_user(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets")
    try:
        if home.parts[:1] == ("~",):
            raise FileNotFoundError("there is no home directory")
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VaultError(
            f"Minari keeps its datasets in {home}, which cannot be made ({error.strerror or error})"
            ": set MINARI_DATASETS_PATH to a directory that can be written."
        ) from error
    return home.absolute()


def _buffers(vault: Dataset, file: SteadyFile, progress: Progress) -> Iterator[Any]:
    causes = vault.episodes.cause
    episodes = count_items(vault, len(causes), progress)
    for number, (episode, cause) in enumerate(zip(episodes, causes, strict=True)):
        yield _buffer(number, episode, cause in CAUSES[[CUT, OPEN]])
        file.check()


def _register(name: str) -> None:
    """Check a dataset's name, and register the directories above it with Minari."""
    spaces, above = require("minari.namespace"), PurePath(name).parent.as_posix()
    try:
        if not re.fullmatch(r"([-\w]+/)*[-\w]+-v\d+", name):
            raise ValueError("it must be of letters, digits, -, _ and slashes, and end as in a-v0")
        if above != "." and above not in spaces.list_local_namespaces():
            spaces.create_namespace(above)
    except ValueError as error:
        raise OptionError(f"Minari does not take the name {name}: {error}.") from error


@contextmanager
def read_minari(source: StrPath, env_spec: EnvSpec | None = None) -> Iterator[Imported]:
    """Read local Minari datasets: those of a single agent, and those that --to minari wrote.

    Boxes keep their shape and type. Actions are scaled from their bounds to [-1, 1], and the
    provenance keeps the bounds. Other observations, such as dictionaries and texts, are refused.
    """
    minari = require("minari")
    name = PurePath(source).as_posix()
    _check_contained(_home() / name)
    with readable(f"Minari dataset {name}"):
        dataset = minari.load_dataset(name)
    spec = check_spec(_spec_of(dataset, name), env_spec)
    origin: dict[str, Any] = {"format": "minari", "dataset": name}
    if bounds := _bounds(dataset, spec):
        origin["action_bounds"] = [x.ravel().tolist() for x in bounds]
    yield Imported(spec, origin, _records(dataset, spec, name), int(dataset.total_episodes))


def _check_contained(directory: Path) -> None:
    """Raise `VaultError` if Minari would read other files for a dataset, or run its code."""
    check_links_stay_inside(directory)
    with readable(directory):
        paths = sorted(directory.rglob("*"))
        for path in paths:
            if path.suffix in HDF5:
                with ExitStack() as stack:
                    open_hdf5(path, stack)
        metadata = directory / "data" / "metadata.json"
        text = metadata.read_bytes() if metadata.exists() else b"{}"
        content = layout.load_json(text, str(metadata))
        episodes = int(content.get("total_episodes", 0))
        if episodes > sum(path.stat().st_size for path in paths):  # Minari numbers all of them
            raise ValueError(f"it has not the {episodes:,} episodes that it says")
    if metadata.exists() and not {"observation_space", "action_space"} <= content.keys():
        raise VaultError(
            f"{metadata} does not record the observation and action spaces: to find them, Minari "
            "would import and run the environment that it names. If you trust it, load and save it "
            "with Minari, and convert the saved dataset."
        )


def _spaces(spec: EnvSpec) -> tuple[Any, Any]:
    spaces = require("gymnasium").spaces
    agents = spec.num_agents
    observation = _space(map_tree(lambda leaf: leaf.with_agents(agents), spec.observation_spec))
    if isinstance(spec.action, Discrete):
        return observation, spaces.MultiDiscrete([spec.num_actions] * agents)
    return observation, spaces.Box(-np.inf, np.inf, (agents, spec.action_size), np.float32)


def _space(tree: Any) -> Any:
    """Return the space of an array, or of a dictionary of them."""
    spaces = require("gymnasium").spaces
    if not isinstance(tree, ArraySpec):
        return spaces.Dict({name: _space(leaf) for name, leaf in tree.items()})
    dtype = _boxed(tree.numpy_dtype)
    if gate.is_float(dtype):
        return spaces.Box(-np.inf, np.inf, tree.shape, dtype)
    low, high = (0, 1) if tree.dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, tree.shape, dtype)


def _boxed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of a box for a leaf."""
    return np.dtype(np.uint8) if dtype.kind == "b" else plain_dtype(dtype).newbyteorder("=")


def _buffer(number: int, episode: Episode, cut: bool) -> Any:
    steps, final = episode
    view = steps.view
    views = with_final(view, final or map_tree(lambda x: x[-1], view))
    terminated = steps.terminated.all(-1)
    truncated = ~terminated & (steps.terminated | steps.truncated).all(-1)
    truncated[-1] |= ~terminated[-1]

    per_step = {name: getattr(steps, name) for name in _PER_STEP}
    per_step |= flatten_tree(steps.extras or {}, layout.EXTRAS)
    infos = {
        **flatten_tree(views.state, "state"),
        "legal_actions": views.legal_actions,
        "alive": views.alive,
        "final_known": np.full(len(views.alive), final is not None),
        "cut": np.full(len(views.alive), cut),
        # The last entry is repeated: Minari's infos include the final view.
        **{key: np.concatenate([values, values[-1:]]) for key, values in per_step.items()},
    }
    infos = {key: x.astype(plain_dtype(x.dtype), copy=False) for key, x in infos.items() if x.size}
    return require("minari.data_collector").EpisodeBuffer(
        id=number,
        observations=map_tree(lambda x: x.astype(_boxed(x.dtype), copy=False), views.observation),
        actions=steps.action,
        rewards=steps.reward.mean(-1).tolist(),
        terminations=terminated.tolist(),
        truncations=truncated.tolist(),
        infos=infos,
    )


def _spec_of(dataset: Any, name: str) -> EnvSpec:
    match = _SPEC.fullmatch(str(dataset.storage.metadata.get("description", "")))
    with readable(f"Minari dataset {name}"):
        if match:
            return EnvSpec.from_json(json.loads(match[1]))
    spaces = require("gymnasium").spaces
    box, action = dataset.observation_space, dataset.action_space
    if not isinstance(box, spaces.Box) or not isinstance(action, spaces.Discrete | spaces.Box):
        raise VaultError(
            f"the Minari dataset {name} has observations {box} and actions {action}: only "
            "boxes, and for actions also discrete spaces from 0, are supported."
        )
    discrete = isinstance(action, spaces.Discrete)
    if discrete and action.start:
        raise VaultError(f"the Minari dataset {name} counts its actions from {action.start}.")
    kind = Discrete(int(action.n)) if discrete else Continuous(int(np.prod(action.shape)))
    kept = box.dtype.name in DTYPES
    observation = ArraySpec(box.shape or (1,), box.dtype.name if kept else "float32")
    size = observation.size if observation == ArraySpec((observation.size,)) else 0
    return EnvSpec("", 1, 0, size, kind, state="concatenated", observation=observation)


def _bounds(dataset: Any, spec: EnvSpec) -> tuple[NumpyArray, NumpyArray] | None:
    """Return the finite bounds of a single agent's actions, if they are not -1 and 1."""
    space = dataset.action_space
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if not isinstance(spec.action, Continuous) or low is None or high is None:
        return None
    if not np.isfinite([low, high]).all() or ((low == -1).all() and (high == 1).all()):
        return None
    return low, high


def _records(dataset: Any, spec: EnvSpec, name: str) -> Iterator[ImportedRow]:
    bounds = _bounds(dataset, spec)
    with readable(f"Minari dataset {name}"):
        for episode in dataset.iterate_episodes():
            infos = episode.infos or {}
            if "final_known" in infos:
                yield _record(episode, infos, spec)
            elif spec.num_agents == 1:
                actions = np.asarray(episode.actions)
                actions = actions if bounds is None else to_unit_range(actions, *bounds)
                yield _record(episode, _of_one(episode, spec), spec, actions)
            else:
                raise VaultError(
                    "the Minari dataset does not record each agent's rewards and ends: export it "
                    "again."
                )


def _of_one(episode: Any, spec: EnvSpec) -> dict[str, NumpyArray]:
    """Return the infos of a single agent's episode, as `write_minari` would write them."""
    slots = len(episode.observations)
    lead = (slots, 1)
    ended = bool(episode.terminations[-1] or episode.truncations[-1])
    observations = np.asarray(episode.observations).reshape(slots, -1)
    return {
        **({"state": observations} if spec.state_size else {}),
        "legal_actions": np.ones((*lead, spec.action_size), bool),
        "alive": np.ones(lead, bool),
        "reward": np.asarray(episode.rewards)[:, None],
        "terminated": np.asarray(episode.terminations)[:, None],
        "truncated": (np.asarray(episode.truncations) & ~np.asarray(episode.terminations))[:, None],
        "behaviour_log_prob": np.full(lead, np.nan),
        "policy_id": np.full(slots, -1),
        "final_known": np.full(slots, slots > len(episode.rewards)),
        "cut": np.full(slots, not ended),
    }


def _record(
    episode: Any,
    infos: dict[str, NumpyArray],
    spec: EnvSpec,
    actions: NumpyArray | None = None,
) -> ImportedRow:
    length = len(episode.rewards)
    arrays = {
        **flatten_tree(map_tree(np.asarray, episode.observations), layout.OBSERVATIONS),
        "actions": np.asarray(episode.actions) if actions is None else actions,
        **{DISK_NAMES[name]: infos[name] for name in (*_PER_STEP, "legal_actions", "alive")},
        **{disk_name_of(x): y for x, y in infos.items() if x.startswith(("state", layout.EXTRAS))},
    }
    steps = to_steps({key: x[None, :length] for key, x in arrays.items()}, spec)
    truncated = steps.truncated.copy()
    truncated[0, -1] |= ~steps.terminated[0, -1]
    steps = steps._replace(truncated=truncated, last=(steps.terminated | truncated).all(-1))
    cut: NumpyArray = np.zeros((1, length), bool)
    cut[0, -1] = infos["cut"][0]
    finals = _final(arrays, length, spec) if infos["final_known"][0] else None
    return ImportedRow(steps, finals, cut)


def _final(arrays: dict[str, NumpyArray], length: int, spec: EnvSpec) -> FinalObservations:
    last = {name: array[None, -1:] for name, array in arrays.items() if len(array) > length}
    view = to_steps(last, spec).view
    row: NumpyArray = np.zeros(1, np.int64)
    return FinalObservations(row, row + length - 1, map_tree(lambda leaf: leaf[0], view))
