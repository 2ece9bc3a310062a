"""The format on disk: names, data types, keys, and the content of offmarl's small keys.

A vault is a directory ``<name>.vlt/<uid>`` in the layout of flashbax 1.x. It holds an OCDBT
key-value store and ``metadata.json``. The store has a zarr v2 array ``(B, 10**13, *leaf)`` for each
leaf, and the valid length in ``vault_index``. Vaults of offmarl also have keys under ``offmarl/``,
which stock programs ignore. Names on disk appear only here and in `offmarl.vault.format.encoding`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, get_args

import google_crc32c
import msgspec
import numpy as np

from offmarl import records
from offmarl._arrays import largest_divisor
from offmarl.errors import ShapeError, VaultError, VaultFormatError
from offmarl.records import MOST_STEP_BYTES, Count
from offmarl.types import ArraySpec, Continuous, EnvSpec, flatten_tree
from offmarl.vault.format import tables

SCHEMA_VERSION = 5
"""Its episode table has the policy of each agent; older versions have that of the first agent."""
READABLE_VERSIONS = (3, 4, SCHEMA_VERSION)
"""Version 3 has float32 vectors only; see `has_typed_leaves`."""
TIME_AXIS = 10**13
"""Length of the time axis of every array; stock programs append to no other length."""
MAX_STOCK_LENGTH = 2**31 - 1
"""Largest valid length that stock programs can read, which is an int32."""
MAX_ROWS = 2**24
MAX_CHUNK_BYTES = 2**32
"""Maximum bytes of a chunk; a forged vault with larger chunks could fill the memory."""
_LEAST_CHUNK_STEPS = 64
"""Least steps of a chunk that `default_chunk_steps` chooses, unless its steps are larger."""
MAX_LEAVES = 256
"""Maximum leaves of observations, states and extras together."""
MAX_AXES = 16
"""Maximum axes of one step of a leaf; NumPy's arrays have at most 64 axes, two of them in front."""

MANIFEST = "manifest.ocdbt"
UNFINISHED = f"{MANIFEST}.__lock"
"""File that a commit writes and renames to the manifest."""
METADATA = "metadata.json"
DATA = "d"
"""The directory of the data files."""
LOCK = "writer.lock"

SIGNALS = ("rewards", "terminals", "truncations")
"""The arrays that determine the episodes of any vault."""

BARE = "/"
"""The name given to the array of a vault that holds a single array without a name."""
OBSERVATIONS = "observations"
STATE = "infos.state"
EXTRAS = "extras"
"""Names of arrays without a tree, or prefixes of the paths of a tree's leaves."""
POLICY_IDS = "infos.policy_ids"

INDEX_PREFIX = "vault_index/"
INDEX_KEY = "vault_index/0"
SCHEMA_KEY = "offmarl/schema"
HEAD_KEY = "offmarl/head"
RUNNING_KEY = "offmarl/running"
PROVENANCE_KEY = "offmarl/provenance"
STATISTICS_KEY = "offmarl/statistics"
EPISODES_PREFIX = "offmarl/episodes/"
FINALS_PREFIX = "offmarl/finals/"
CHECKSUMS_PREFIX = "offmarl/crc32c/"

Codec = Literal["raw", "zstd"]


NumpyArray = Any
"""A NumPy array. The records of `offmarl.types` hold NumPy's arrays as well as JAX's, but are
annotated for JAX's, so type checkers must accept any type here."""


class _TypeAndShape(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Leaf(_TypeAndShape):
    """One array of a vault: the type and shape of a single step of a single row."""

    @cached_property
    def step_bytes(self) -> int:
        """Bytes of one step of one row, uncompressed."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Schema:
    """The properties of a vault of offmarl that never change."""

    spec: EnvSpec
    rows: int
    chunk_rows: int
    """Rows that are stored together; divides ``rows``."""
    chunk_steps: int
    codec: Codec
    version: int = SCHEMA_VERSION

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The type of a record of the episode table."""
        agents = self.spec.num_agents
        return tables.dtype(agents, agents if self.version == SCHEMA_VERSION else 1)

    @cached_property
    def leaves(self) -> Mapping[str, Leaf]:
        """The vault's arrays, in their canonical order."""
        return leaves(self.spec)

    @property
    def stock_readable(self) -> bool:
        """Whether stock programs find data they understand: every agent has all leaves."""
        return not self.spec.is_per_agent

    @cached_property
    def chunk_bytes(self) -> int:
        """Uncompressed bytes of one chunk of every array."""
        step_bytes = sum(leaf.step_bytes for leaf in self.leaves.values())
        return self.chunk_rows * self.chunk_steps * step_bytes

    def chunk_key(self, name: str, block: int, number: int) -> str:
        """Return the key of a chunk: the index of its block of rows, and of its chunk of time."""
        return f"{prefix_of(name)}{block}.{number}{'.0' * len(self.leaves[name].shape)}"

    def chunk_keys(self, number: int) -> list[str]:
        """Return the keys of one chunk of time: of each leaf, each block of rows."""
        blocks = range(self.rows // self.chunk_rows)
        return [self.chunk_key(name, block, number) for name in self.leaves for block in blocks]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        stock = {} if self.stock_readable else {"stock_readable": False}
        return {"version": self.version, **values, "spec": self.spec.to_json(), **stock}

    @staticmethod
    @lru_cache(32)
    def decode(value: bytes) -> "Schema":
        """Parse the JSON of `to_json`; cached, since every use of a vault reads it."""
        return Schema.from_json(load_json(value, SCHEMA_KEY))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Schema":
        """Read what `to_json` wrote."""
        if data.get("version") not in READABLE_VERSIONS:
            raise VaultFormatError(
                f"the vault has format version {data.get('version')!r:.80}, and this offmarl reads "
                f"up to {SCHEMA_VERSION}: install a newer offmarl."
            )
        try:
            values = {field.name: data[field.name] for field in fields(cls)}
            schema = cls(**{**values, "spec": EnvSpec.from_json(data["spec"])})
            schema._check()
        except (KeyError, ValueError, ShapeError) as error:
            raise VaultFormatError(
                f"the vault's schema is damaged ({error!r:.200}): copy the vault again "
                "from its source, or copy its intact episodes with `offmarl salvage`."
            ) from error
        return schema

    def _check(self) -> None:
        """Raise `ValueError` for impossible sizes, before memory is allocated for them."""
        counts = (self.rows, self.chunk_rows, self.chunk_steps)
        if any(type(size) is not int or size < 1 for size in counts):
            raise ValueError("rows and steps are not all whole numbers of at least 1")
        check_leaves(self.spec)
        if self.rows > MAX_ROWS or self.chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError("rows or chunks are too large")
        if self.rows % self.chunk_rows or self.codec not in get_args(Codec):
            raise ValueError("chunk_rows does not divide rows, or the codec is unknown")


class Head(NamedTuple):
    """Counts that every commit replaces. Tables are read up to these counts."""

    length: Count = 0
    """Steps of each row that are valid."""
    episodes: Count = 0
    """Records in the episode table: episodes that ended or were cut off."""
    finals: Count = 0
    """Final views stored."""
    total_return: float = 0.0
    """Sum over these episodes of the return, which is averaged over agents."""
    runs: Mapping[str, Count] = {}
    """Number of committed records of each run."""
    run: str | None = None
    """The run that wrote last, if any; an episode never spans two runs."""
    unverified: tuple[tuple[Count, Count], ...] = ()
    """Intervals of steps that were adopted from a stock writer."""

    def whole_length(self, stock_length: int) -> int:
        """Return the steps of each row, including those that a stock program appended.

        ``stock_length`` is the length in ``vault_index``, which stops at `MAX_STOCK_LENGTH`.
        """
        return self.length + stock_length - min(self.length, MAX_STOCK_LENGTH)

    @classmethod
    def decode(cls, value: bytes) -> "Head":
        """Parse the JSON of ``_asdict()``; `VaultFormatError` if it is damaged."""
        data = load_json(value, HEAD_KEY)
        try:
            return msgspec.convert([data[name] for name in cls._fields], cls)
        except (KeyError, ValueError) as error:
            raise VaultFormatError(
                f"the vault's head is damaged ({error!r:.200}): copy the vault again "
                "from its source."
            ) from error


def prefix_of(name: str) -> str:
    """Return the prefix of a leaf's keys."""
    return "" if name == BARE else f"{name}./"


def has_typed_leaves(spec: EnvSpec) -> bool:
    """Whether a vault of this spec has other leaves than vectors of observations and state."""
    return not spec.is_vector or bool(spec.extras) or spec.state_size == 0


def check_leaves(spec: EnvSpec) -> None:
    """Raise `ShapeError` if leaves are too many, too large, empty, or have too many axes."""
    trees = (spec.observation, OBSERVATIONS), (spec.global_state, STATE), (spec.extras, EXTRAS)
    specs: dict[str, ArraySpec] = {}
    for tree, name in trees:
        specs |= flatten_tree(tree, name) if tree else {}
    if len(specs) > MAX_LEAVES:
        raise ShapeError(f"there are {len(specs)} leaves, and {MAX_LEAVES} is the most.")
    step_bytes = spec.num_agents * sum(leaf.num_bytes for leaf in specs.values())
    if step_bytes > MOST_STEP_BYTES:
        raise ShapeError(
            f"{', '.join(specs)} take up to {step_bytes:,} bytes a step, and {MOST_STEP_BYTES:,} "
            "is the most: store smaller images."
        )
    for name, leaf in specs.items():
        if leaf.size < 1 or len(leaf.shape) >= MAX_AXES:
            raise ShapeError(
                f"{name} has the shape {leaf.shape}: a leaf needs at least one entry, and has at "
                f"most {MAX_AXES - 1} axes."
            )


def _leaves_of(tree: Any, name: str) -> dict[str, Leaf]:
    """Return the arrays of a tree of specs, by their names on disk."""
    specs: dict[str, ArraySpec] = flatten_tree(tree, name) if tree else {}
    return {path: Leaf(spec.numpy_dtype, spec.shape) for path, spec in specs.items()}


@lru_cache(64)
def leaves(spec: EnvSpec) -> Mapping[str, Leaf]:
    """Name the arrays of a vault of offmarl, in their canonical order; there may be no state.

    The mapping is cached, because every append asks for it.
    """
    agents, view = (spec.num_agents,), spec.view_spec
    float32, int32 = np.dtype("<f4"), np.dtype("<i4")
    continuous, action_size = isinstance(spec.action, Continuous), spec.action_size
    return {
        **_leaves_of(view.observation, OBSERVATIONS),
        "actions": Leaf(float32, (*agents, action_size)) if continuous else Leaf(int32, agents),
        "rewards": Leaf(float32, agents),
        "terminals": Leaf(float32, agents),
        "truncations": Leaf(float32, agents),
        **(_leaves_of(view.state, STATE) if spec.state_size else {}),
        "infos.legals": Leaf(float32, (*agents, action_size)),
        "infos.alive": Leaf(float32, agents),
        "infos.behaviour_log_probs": Leaf(float32, agents),
        POLICY_IDS: Leaf(int32, agents),
        **_leaves_of(spec.extras, EXTRAS),
    }


DISK_NAMES = {
    "observation": OBSERVATIONS,
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "truncations",
    "state": STATE,
    "legal_actions": "infos.legals",
    "alive": "infos.alive",
    "behaviour_log_prob": "infos.behaviour_log_probs",
    "policy_id": POLICY_IDS,
}
"""Fields of records in Python, and the arrays or groups of arrays that hold them, in the order of
`leaves`."""


def column_of(disk_name: str) -> str:
    """Return the column of an array on disk."""
    for column, name in DISK_NAMES.items():
        if disk_name == name or disk_name.startswith(f"{name}."):
            return column + disk_name.removeprefix(name)
    return disk_name


def disk_name_of(column: str) -> str:
    """Return the name of a column's array on disk."""
    field, dot, path = column.partition(".")
    return DISK_NAMES.get(field, field) + dot + path


def default_chunk_steps(spec: EnvSpec, rows: int, expected: int | None = None) -> int:
    """Return the default steps of a chunk: 1024, or a smaller power of two.

    The chunks of all rows and arrays take at most 32 MB. With images they take about 1 MB at most:
    the last chunk is stored whole, and could otherwise take much more than the steps in it.

    If ``expected``, the steps that each row will have, is known, the same number of chunks is
    shorter: these steps almost fill the last one. Chunks keep 64 steps, for data that is appended.
    """
    step_bytes = rows * sum(leaf.step_bytes for leaf in leaves(spec).values())
    most = 2**25 if spec.is_vector else 2**20
    steps = 1 << max(0, min(1024, most // step_bytes).bit_length() - 1)
    if expected is None:
        return steps
    number = -(-expected // steps)
    return max(-(-expected // max(number, 1)), min(steps, _LEAST_CHUNK_STEPS))


def stored_bytes(spec: EnvSpec, rows: int, steps: int) -> int:
    """Return the bytes of a new vault whose rows have ``steps`` steps each, in whole chunks."""
    size = default_chunk_steps(spec, rows, steps)
    step_bytes = sum(leaf.step_bytes for leaf in leaves(spec).values())
    return -(-steps // size) * size * rows * step_bytes


def default_chunk_rows(rows: int, chunk_steps: int) -> int:
    """Return how many rows share a chunk, which then holds at most 2048 steps over all its rows.

    Each key has a fixed cost, which would dominate if a chunk held few steps of a single row.
    """
    return largest_divisor(rows, 2048 // chunk_steps)


def episodes_key(first: int) -> str:
    """Return the key of the block of the episode table that begins with this number."""
    return f"{EPISODES_PREFIX}{first:015d}"


def finals_key(first: int) -> str:
    """Return the key of the block of final views that begins with this number."""
    return f"{FINALS_PREFIX}{first:015d}"


def checksums_key(chunk: int) -> str:
    """Return the key of the CRC32Cs of one chunk of time, by leaf and then by block of rows."""
    return f"{CHECKSUMS_PREFIX}{chunk:015d}"


def encode_checksums(values: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """Return the concatenated CRC32Cs of some values, 4 bytes big-endian each."""
    arrays = (np.frombuffer(value, np.uint8) for value in values)
    return b"".join(google_crc32c.value(array).to_bytes(4, "big") for array in arrays)


def decode_checksums(data: bytes) -> NumpyArray:
    """Return the numbers that `encode_checksums` wrote; an incomplete last one is ignored."""
    return np.frombuffer(data, ">u4", len(data) // 4)


def encode_index(length: int) -> bytes:
    """Return the bytes of ``vault_index``, an int32 that stops at `MAX_STOCK_LENGTH`."""
    return np.array([min(length, MAX_STOCK_LENGTH)], "<i4").tobytes()


def decode_index(data: bytes) -> int:
    """Read the valid length that stock programs see."""
    if len(data) != 4:
        raise VaultFormatError(f"{INDEX_KEY} has {len(data)} bytes instead of 4.")
    return int.from_bytes(data, "little", signed=True)


load_json = partial(records.parse, error=VaultFormatError)
"""Parses a JSON object from an untrusted source, named for errors."""


def damage_error(
    path: PurePath, fault: object, kind: type[VaultFormatError] = VaultFormatError
) -> VaultFormatError:
    """Return the error for a damaged vault; ``fault`` may be an `offmarl.vault.Fault`."""
    return kind(
        f"{path} is damaged: {fault}. `offmarl verify --deep` lists all damage. Copy the vault "
        "again from its source, or copy its intact episodes with `offmarl salvage`."
    )


def dump_json(value: Any) -> bytes:
    """Serialise to JSON; `VaultError` if a value is not plain JSON."""
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise VaultError(f"provenance must be plain JSON values: {error}.") from error


OWN_PREFIX = "offmarl/"
_MARK = b"\x00c1c"
_SIZE = len(_MARK) + 4


def seal(values: Mapping[str, bytes | bytearray]) -> dict[str, bytes | bytearray]:
    """Return values to store: those under offmarl's keys with a checksum, others unchanged."""
    return {
        key: b"".join((value, _MARK, google_crc32c.value(value).to_bytes(4, "big")))
        if key.startswith(OWN_PREFIX)
        else value
        for key, value in values.items()
    }


def unseal(sealed_values: Mapping[str, bytes], path: PurePath) -> dict[str, bytes]:
    """Return the values that were sealed; `VaultFormatError` if a checksum is wrong."""
    values = dict(sealed_values)
    for key, sealed in sealed_values.items():
        if not sealed:  # TensorStore reads a data file that is gone as empty
            raise damage_error(path, f"the data file of {key} is missing or truncated")
        if key.startswith(OWN_PREFIX):
            values[key], mark, checksum = sealed[:-_SIZE], sealed[-_SIZE:-4], sealed[-4:]
            crc32c = google_crc32c.value(values[key]).to_bytes(4, "big")
            if mark != _MARK or checksum != crc32c:
                raise damage_error(path, f"the checksum of {key} is wrong")
    return values
