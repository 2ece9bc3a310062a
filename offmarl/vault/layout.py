"""The format on disk: names, data types, chunk keys, and the records they stand for.

A vault is a directory ``<name>.vlt/<uid>`` as flashbax 1.x lays it out: an OCDBT key-value store
with one zarr v2 array a leaf, shaped ``(B, 10**13, *leaf)``, the valid length in ``vault_index``,
and ``metadata.json``. Ours adds keys under ``offmarl/``, which stock programs do not look at.
This is the only file that knows the published names.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import google_crc32c
import numpy as np

from offmarl.errors import ShapeError, VaultError, VaultFormatError
from offmarl.types import Continuous, Discrete, EnvSpec, Transition, View
from offmarl.vault.tables import Signals

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 had no checksums on the values of our own keys."""
STOCK_VERSION = 1.2
TIME_AXIS = 10**13
"""Length of the time axis of every array; stock appends to no other."""
MAX_STOCK_LENGTH = 2**31 - 1
"""Stock keeps the valid length in an int32."""
MAX_ROWS = 2**24
MAX_CHUNK_BYTES = 2**32
"""No vault has more; a forged one that says so would have us fill the memory."""

STOCK_KEYS = ("version", "structure_shape", "structure_dtype")
"""The keys of ``metadata.json`` that are not the user's own."""

SIGNALS = ("rewards", "terminals", "truncations")
"""The arrays that episodes are told by in any vault."""

INDEX_PREFIX = "vault_index/"
INDEX_KEY = "vault_index/0"
SCHEMA_KEY = "offmarl/schema"
HEAD_KEY = "offmarl/head"
RUNNING_KEY = "offmarl/running"
PROVENANCE_KEY = "offmarl/provenance"
EPISODES_PREFIX = "offmarl/episodes/"
FINALS_PREFIX = "offmarl/finals/"
CHECKSUMS_PREFIX = "offmarl/crc32c/"

Codec = Literal["raw", "zstd"]

_MAX_DEPTH = 32
_DTYPES = frozenset(np.dtype(code).name for code in "?bBhHiIlLqQefd")
"""The types of arrays that flashbax and JAX have and NumPy too."""

NumpyArray = Any
"""A NumPy array. The records of `offmarl.types` hold such as well as JAX's, for which they are
annotated, so a type checker must not look."""


class Leaf(NamedTuple):
    """One array of a vault: the type and shape of a single step of a single row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of one row, uncompressed."""
        return self.dtype.itemsize * math.prod(self.shape)

    def chunk_key(self, name: str, block: int, chunk: int) -> str:
        """Return the key of a chunk: which block of rows, and which chunk of time."""
        return prefix_of(name) + ".".join([str(block), str(chunk), *("0" for _ in self.shape)])


class Schema(NamedTuple):
    """What never changes in a vault of ours."""

    spec: EnvSpec
    rows: int
    chunk_rows: int
    """Rows that are stored together; divides ``rows``."""
    chunk_steps: int
    codec: Codec

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads back."""
        return {"version": SCHEMA_VERSION, **self._asdict(), "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Schema":
        """Read what `to_json` wrote."""
        if data.get("version") not in READABLE_VERSIONS:
            raise VaultFormatError(
                f"the vault has format version {data.get('version')!r:.80}, and this offmarl reads "
                f"up to {SCHEMA_VERSION}: install a newer offmarl."
            )
        try:
            fields = {name: data[name] for name in cls._fields}
            schema = cls(**{**fields, "spec": EnvSpec.from_json(data["spec"])})
            schema._check()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise VaultFormatError(
                f"the vault's schema cannot be understood ({error!r:.200}), so it is damaged: "
                "`offmarl repair` may find it in metadata.json; or copy the vault again."
            ) from error
        return schema

    def _check(self) -> None:
        """Raise `ValueError` where sizes make no sense, before anybody allocates so much."""
        spec = self.spec
        sizes = (spec.num_agents, spec.observation_size, spec.state_size, spec.action_size)
        counts = (self.rows, self.chunk_rows, self.chunk_steps, spec.num_agents)
        if any(type(size) is not int or size < 0 for size in (*sizes, *counts)):
            raise ValueError("sizes are not all natural numbers")
        step_bytes = sum(leaf.step_bytes for leaf in leaves(spec).values())
        chunk_bytes = self.chunk_rows * self.chunk_steps * step_bytes
        if min(counts) < 1 or self.rows > MAX_ROWS or chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError("sizes are out of all proportion")
        if self.rows % self.chunk_rows or self.codec not in get_args(Codec):
            raise ValueError("chunk_rows or codec is not one there is")


class Head(NamedTuple):
    """What every commit replaces; the rest of a vault is read up to what the head says."""

    length: int = 0
    """Steps of each row that are valid."""
    episodes: int = 0
    """Records in the episode table: those that ended, or that nobody will end."""
    finals: int = 0
    """Final views stored."""
    total_return: float = 0.0
    """Sum over these episodes of the mean over agents of their returns."""
    runs: Mapping[str, int] = {}
    """How many chunks of each run are there."""
    run: str | None = None
    """The run that wrote last, if one of ours did; an episode never spans two."""
    unverified: tuple[tuple[int, int], ...] = ()
    """Intervals of steps that were adopted from a stock writer."""

    def whole_length(self, stock_length: int) -> int:
        """Return the steps of each row, those that a stock program appended included.

        ``stock_length`` is that of the index, which counts them, but no further than it can.
        """
        return self.length + stock_length - min(self.length, MAX_STOCK_LENGTH)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Head":
        """Read what was written of ``_asdict()``; `VaultFormatError` where it cannot be."""
        try:
            intervals = tuple((int(a), int(b)) for a, b in data["unverified"])
            head = cls(**{**data, "unverified": intervals})
            counts = (head.length, head.episodes, head.finals, *head.runs.values())
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError("counts are not all natural numbers")
            if type(head.total_return) not in (int, float) or not isinstance(head.run, str | None):
                raise ValueError("total_return or run is of another type")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise VaultFormatError(
                f"the vault's head cannot be understood ({error!r:.200}), so it is damaged: "
                "`offmarl repair` keeps what is sound."
            ) from error
        return head


def prefix_of(name: str) -> str:
    """Return what the keys of a leaf begin with."""
    return f"{name}./"


def leaves(spec: EnvSpec) -> dict[str, Leaf]:
    """Name the arrays of a vault of ours, in their canonical order."""
    agents = (spec.num_agents,)
    float32, int32 = np.dtype("<f4"), np.dtype("<i4")
    continuous = isinstance(spec.action, Continuous)
    return {
        "observations": Leaf(float32, (*agents, spec.observation_size)),
        "actions": Leaf(float32, (*agents, spec.action_size))
        if continuous
        else Leaf(int32, agents),
        "rewards": Leaf(float32, agents),
        "terminals": Leaf(float32, agents),
        "truncations": Leaf(float32, agents),
        "infos.state": Leaf(float32, (spec.state_size,)),
        "infos.legals": Leaf(float32, (*agents, spec.action_size)),
        "infos.alive": Leaf(float32, agents),
        "infos.behaviour_log_probs": Leaf(float32, agents),
        "infos.policy_ids": Leaf(int32, ()),
    }


def to_disk(transition: Transition) -> dict[str, NumpyArray]:
    """Name the arrays of a record as they are on disk; nothing is copied or converted."""
    view = transition.view
    return {
        "observations": np.asarray(view.observation),
        "actions": np.asarray(transition.action),
        "rewards": np.asarray(transition.reward),
        "terminals": np.asarray(transition.terminated),
        "truncations": np.asarray(transition.truncated),
        "infos.state": np.asarray(view.state),
        "infos.legals": np.asarray(view.legal_actions),
        "infos.alive": np.asarray(view.alive),
        "infos.behaviour_log_probs": np.asarray(transition.behaviour_log_prob),
        "infos.policy_ids": np.asarray(transition.policy_id),
    }


def from_disk(arrays: Mapping[str, NumpyArray], spec: EnvSpec) -> Transition:
    """Make a record of what was read; what a foreign vault lacks is filled in.

    Parameters
    ----------
    arrays
        Disk name to ``(B, T, ...)``. Trailing axes may be split otherwise than ours are, as long as
        a step has as many entries.
    spec
        The sizes to bring them to.
    """
    lead = arrays["observations"].shape[:2]
    wanted = leaves(spec)

    def field(name: str, missing: float = 0.0) -> NumpyArray:
        dtype, shape = wanted[name]
        if name not in arrays:
            return np.full((*lead, *shape), missing, dtype)
        return arrays[name].reshape(*lead, *shape).astype(dtype, copy=False)

    def mask(name: str, missing: float = 0.0) -> NumpyArray:
        return field(name, missing) != 0

    observation = field("observations")
    state = field("infos.state") if "infos.state" in arrays else observation.reshape(*lead, -1)
    terminated, truncated = mask("terminals"), mask("truncations")
    return Transition(
        view=View(observation, state, mask("infos.legals", 1.0), mask("infos.alive", 1.0)),
        action=field("actions"),
        reward=field("rewards"),
        terminated=terminated,
        truncated=truncated,
        last=(terminated | truncated).all(-1),
        behaviour_log_prob=field("infos.behaviour_log_probs", np.nan),
        policy_id=field("infos.policy_ids", -1),
    )


def signals_of(arrays: Mapping[str, NumpyArray]) -> Signals:
    """Return what episodes are told by; ends and policies that no array names are unknown."""
    reward = arrays["rewards"]
    reward = reward.reshape(*reward.shape[:2], -1)
    ends = [arrays.get(name, np.zeros_like(reward)) for name in ("terminals", "truncations")]
    terminated, truncated = (end.reshape(reward.shape) != 0 for end in ends)
    unknown = np.full(reward.shape[:2], -1)
    return Signals(reward, terminated, truncated, arrays.get("infos.policy_ids", unknown))


def spec_of(found: Mapping[str, Leaf]) -> EnvSpec:
    """Infer the sizes of a foreign vault from the shapes of its arrays.

    The number of discrete actions is that of the legal-action mask, or 0 where there is none and
    the data must tell.
    """
    needed = ("observations", "actions", "rewards")
    lacking = [name for name in needed if name not in found or not found[name].shape]
    if lacking:
        raise VaultFormatError(
            f"no multi-agent data: the vault's arrays are {', '.join(found) or 'none'}, and "
            f"{', '.join(lacking)} with an axis of agents must be among them. Its arrays can still "
            "be read one by one with read()."
        )
    num_agents, *observation = found["observations"].shape
    observation_size = math.prod(observation)
    state = found.get("infos.state")
    return EnvSpec(
        name="",
        num_agents=num_agents,
        observation_size=observation_size,
        state_size=math.prod(state.shape) if state else num_agents * observation_size,
        action=_action_of(found),
        reward="individual",
        state="native" if state else "concatenated",
    )


def _action_of(found: Mapping[str, Leaf]) -> Discrete | Continuous:
    dtype, (_, *action) = found["actions"]
    if dtype.kind == "f":
        return Continuous(math.prod(action))
    legals = found.get("infos.legals")
    return Discrete(legals.shape[-1] if legals else 0)


def view_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """Return the packed type of one stored final view."""
    agents = (spec.num_agents,)
    return np.dtype(
        [
            ("observation", "<f4", (*agents, spec.observation_size)),
            ("state", "<f4", (spec.state_size,)),
            ("legal_actions", "?", (*agents, spec.action_size)),
            ("alive", "?", agents),
        ]
    )


def pack_view(view: View, spec: EnvSpec) -> NumpyArray:
    """Pack M views into records of `view_dtype`; `ShapeError` where they do not fit."""
    dtype = view_dtype(spec)
    packed = np.zeros(len(np.asarray(view.alive)), dtype)
    for name in dtype.names or ():
        source = np.asarray(getattr(view, name))
        _check(f"the final views' {name}", source, packed[name].shape, dtype[name].base)
        packed[name] = source
    return packed


def unpack_view(packed: NumpyArray) -> View:
    """Undo `pack_view`."""
    return View(*(packed[name] for name in View._fields))


def check_transition(arrays: Mapping[str, NumpyArray], schema: Schema) -> int:
    """Return T, the steps in a record; `ShapeError` where it does not fit the vault."""
    shape = arrays["rewards"].shape
    steps = shape[1] if len(shape) > 1 else 0
    if not steps:
        raise ShapeError(
            f"rewards: got shape {shape}, and the vault takes (rows, T, N) with T > 0."
        )
    for name, leaf in leaves(schema.spec).items():
        _check(name, arrays[name], (schema.rows, steps, *leaf.shape), leaf.dtype)
    return steps


def _check(what: str, array: NumpyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "safe"):
        raise ShapeError(
            f"{what}: got {array.dtype} of shape {array.shape}, and the vault takes {dtype} of "
            f"shape {shape}. Convert the array first, or create another vault."
        )


def metadata(schema: Schema) -> dict[str, Any]:
    """Return the content of ``metadata.json`` that stock programs open the vault by."""
    found = leaves(schema.spec)
    lead = (schema.rows, schema.chunk_steps)
    return {
        "version": STOCK_VERSION,
        "structure_shape": _nest({name: str((*lead, *leaf.shape)) for name, leaf in found.items()}),
        "structure_dtype": _nest({name: leaf.dtype.name for name, leaf in found.items()}),
        "offmarl": _signed(schema.to_json()),
    }


def _signed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its CRC32C: the copy of it that is kept beside the store."""
    return {**schema, "crc32c": f"{google_crc32c.value(dump_json(schema)):08x}"}


def schema_in(metadata: Mapping[str, Any]) -> Schema:
    """Return the copy of the schema in ``metadata.json``; `VaultFormatError` if it is not sound."""
    copy = metadata.get("offmarl")
    schema = {k: v for k, v in copy.items() if k != "crc32c"} if isinstance(copy, dict) else {}
    if copy != _signed(schema):
        raise VaultFormatError("metadata.json has no sound copy of the vault's schema.")
    return Schema.from_json(schema)


def read_metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, Leaf], int]:
    """Return the arrays that ``metadata.json`` of any program describes, and their rows."""
    version = metadata.get("version")
    if not isinstance(version, int | float) or not 1 <= version < 2:
        raise VaultFormatError(
            f"metadata.json has version {version!r:.80}, and offmarl reads versions 1.x of "
            "flashbax's vaults: convert it with the flashbax that wrote it."
        )
    shapes = _flatten(metadata.get("structure_shape"))
    dtypes = _flatten(metadata.get("structure_dtype"))
    if shapes.keys() != dtypes.keys() or not shapes:
        raise VaultFormatError("metadata.json does not name a shape and a type for every array.")
    parsed = {name: _parse_shape(name, shape) for name, shape in shapes.items()}
    found = {n: Leaf(_parse_dtype(n, dtypes[n]), shape[2:]) for n, shape in parsed.items()}
    rows = {shape[0] for shape in parsed.values()}
    if len(rows) > 1 or not 0 < max(rows) <= MAX_ROWS:
        raise VaultFormatError(f"metadata.json gives its arrays {sorted(rows)} rows.")
    return found, rows.pop()


def _parse_shape(name: str, text: Any) -> tuple[int, ...]:
    match = re.fullmatch(r"\((\d{1,18}(?:, \d{1,18})+)\)", str(text))
    if not match:
        raise VaultFormatError(f"metadata.json gives {name} the shape {text!r:.80}.")
    sizes = tuple(int(size) for size in match[1].split(","))
    if math.prod(sizes[2:]) > MAX_CHUNK_BYTES:
        raise VaultFormatError(f"metadata.json gives {name} the shape {text!r:.80}.")
    return sizes


def _parse_dtype(name: str, text: Any) -> np.dtype[Any]:
    if str(text) not in _DTYPES:
        raise VaultFormatError(f"metadata.json gives {name} the type {text!r:.80}.")
    return np.dtype(text)


def _nest(flat: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, field = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[field] = value
    return tree


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree}
    if prefix.count(".") > _MAX_DEPTH:
        raise VaultFormatError("metadata.json nests its arrays too deeply to be a vault's.")
    parts = [_flatten(value, f"{prefix}{name}.") for name, value in tree.items()]
    return {name: value for part in parts for name, value in part.items()}


def default_chunk_steps(spec: EnvSpec, rows: int) -> int:
    """Return a power of two of steps, 1024 or so few that those of all rows are 32 MB at most."""
    step_bytes = rows * sum(leaf.step_bytes for leaf in leaves(spec).values())
    return 1 << max(0, min(1024, 2**25 // step_bytes).bit_length() - 1)


def default_chunk_rows(rows: int, chunk_steps: int) -> int:
    """Return how many rows to store together, so that a chunk has 2048 steps of them at most.

    A key costs the same whatever its value; short stretches of many rows would be all keys.
    """
    most = max(1, min(rows, 2048 // max(chunk_steps, 1)))
    return max(size for size in range(1, most + 1) if rows % size == 0)


def zarray(leaf: Leaf, schema: Schema) -> bytes:
    """Return the zarr v2 ``.zarray`` document of a leaf."""
    compressor = {"id": "zstd", "level": 1} if schema.codec == "zstd" else None
    return _zarray(
        leaf.dtype,
        (schema.rows, TIME_AXIS, *leaf.shape),
        (schema.chunk_rows, schema.chunk_steps, *leaf.shape),
        compressor,
    )


def index_zarray() -> bytes:
    """Return the ``.zarray`` document of the valid length."""
    return _zarray(np.dtype("<i4"), (1,), (1,), None)


def documents(schema: Schema) -> dict[str, bytes]:
    """Return the keys and values of all ``.zarray`` documents of a vault of ours."""
    found = {
        prefix_of(name) + ".zarray": zarray(leaf, schema)
        for name, leaf in leaves(schema.spec).items()
    }
    return found | {INDEX_PREFIX + ".zarray": index_zarray()}


def _zarray(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    compressor: dict[str, Any] | None,
) -> bytes:
    return dump_json(
        {
            "zarr_format": 2,
            "shape": shape,
            "chunks": chunks,
            "dtype": dtype.str,
            "compressor": compressor,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "dimension_separator": ".",
        }
    )


def episodes_key(first: int) -> str:
    """Return the key of the block of the episode table that begins with this number."""
    return f"{EPISODES_PREFIX}{first:015d}"


def finals_key(first: int) -> str:
    """Return the key of the block of final views that begins with this number."""
    return f"{FINALS_PREFIX}{first:015d}"


def checksums_key(chunk: int) -> str:
    """Return the key of the CRC32C of a chunk of every leaf and block of rows, in this order."""
    return f"{CHECKSUMS_PREFIX}{chunk:015d}"


def encode_index(length: int) -> bytes:
    """Return the bytes of ``vault_index``, which stops where its int32 does."""
    return np.array([min(length, MAX_STOCK_LENGTH)], "<i4").tobytes()


def decode_index(data: bytes) -> int:
    """Read the valid length that stock programs see."""
    return int(np.frombuffer(data, "<i4")[0])


def dump_json(value: Any) -> bytes:
    """Serialise; `VaultError` where it is no JSON."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise VaultError(f"provenance must be plain JSON values: {error}.") from error
