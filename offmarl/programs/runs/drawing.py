"""The data that a baseline learns from, and how its batches are drawn."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from offmarl.config import Vaults
from offmarl.errors import OptionError, VaultFormatError
from offmarl.paths import local
from offmarl.programs.program import Args, Program
from offmarl.programs.runs.evaluate import Evaluator
from offmarl.replay import SlotRings, Windows
from offmarl.replay.blocks import BLOCK_SEED, BUFFER_BYTES, check_blocked
from offmarl.replay.device import fits_device, require_room
from offmarl.replay.packing import layout_of
from offmarl.replay.priorities import IMPORTANCE, Prioritised
from offmarl.replay.rings import Weighting
from offmarl.replay.sampling import Chosen
from offmarl.types import EnvSpec
from offmarl.vault import Dataset, Mixture, Weights, mix, open_vault
from offmarl.vault.format.metadata import intact_copy
from offmarl.vault.read.manifest import read_metadata
from offmarl.vault.read.open import locate
from offmarl.vault.read.weights import resolve


def open_data(args: Args) -> Dataset | Mixture:
    """Open the vault of a program's arguments, or the mixture of several."""
    shares = _shares(args.vault)
    if len(shares) == 1:
        ((path, share),) = shares.items()
        if share is not None and not 0 < share < math.inf:
            raise OptionError(
                f"{path} has the share {share:g}, and there is no other vault: leave it out."
            )
        return open_vault(path, time_limit=args.time_limit)
    explicit = {path: share for path, share in shares.items() if share is not None}
    if explicit and len(explicit) < len(shares):
        missing = next(path for path in shares if path not in explicit)
        raise OptionError(f"{missing} has no share: give PATH=SHARE for each vault, or for none.")
    return mix(explicit or [*shares], time_limit=args.time_limit)


def environment_of(args: Args) -> str:
    """Return the name of the environment of a program's data, from the metadata if they have it."""
    first = next(iter(_shares(args.vault)))
    try:
        return EnvSpec.from_json(intact_copy(read_metadata(locate(first))).get("spec", {})).name
    except VaultFormatError:  # of another program
        return open_data(args).spec.name


def _shares(vaults: Vaults) -> dict[str, float | None]:
    """Return vaults and their shares, None where no share is given."""
    if isinstance(vaults, Mapping):
        return dict(vaults)
    if isinstance(vaults, str | Path):
        return {str(vaults): None}
    pairs = [_share(text) for text in vaults]
    paths = [path for path, _ in pairs]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise OptionError(f"{twice[0]} is given twice: name it once, with its whole share.")
    return dict(pairs)


def _share(text: str) -> tuple[str, float | None]:
    """Split PATH=SHARE; the name of an existing file may end like one."""
    path, sign, share = str(text).rpartition("=")
    try:
        return (path, float(share)) if sign and not local(text).exists() else (str(text), None)
    except ValueError:
        return str(text), None


_SHORT = 100
"""Windows of at most this many steps may wrap around tiny data more than once."""


class Drawing(NamedTuple):
    """How a run draws its batches."""

    kind: Literal["device", "stream", "blocks"]
    windows: Windows
    weights: Weighting
    draws: Prioritised | None
    record: dict[str, Any]
    """What ``run.json`` says of it."""


def drawing_of(
    args: Args,
    program: Program,
    dataset: Dataset | Mixture,
    evaluator: Evaluator,
) -> Drawing:
    """Resolve the arguments on sampling."""
    windows = Windows(args.batch_size, args.length, args.burn_in, program.return_to_go)
    episodes, kind = evaluator.learned_from, args.replay
    if kind == "blocks" or (kind == "auto" and isinstance(dataset, Dataset) and dataset.is_remote):
        check_blocked(dataset, bool(args.weight or args.prioritise))
        _require_room_for(args, dataset, windows)
        shuffling = {"shuffle_buffer": BUFFER_BYTES, "block_seed": BLOCK_SEED}
        return Drawing("blocks", windows, None, None, shuffling)
    weights, record = _weights(args, dataset, episodes), _recorded_vaults(dataset)
    rings = SlotRings(dataset, windows, episodes, weights)
    if args.length > max(rings.num_slots, _SHORT):
        raise OptionError(
            f"--length {args.length} is more than the data has ({rings.num_slots:,} steps, with "
            "a view after each episode): give windows that fit."
        )
    _require_room_for(args, dataset, windows)
    if kind == "auto":
        kind = "device" if fits_device(rings) else "stream"
    if weights is not None:
        sums = hashlib.sha256(b"".join(array.tobytes() for array in weights))
        record["weights_digest"] = sums.hexdigest()
    if not args.prioritise:
        return Drawing(kind, windows, weights, None, record)
    if not program.td_errors:
        raise OptionError(
            "this program computes no temporal-difference errors, by which windows are "
            "prioritised: leave out --prioritise."
        )
    if kind == "stream":
        raise OptionError(
            "a stream gathers batches before their priorities are known: give --replay device, or "
            "leave out --prioritise."
        )
    starts: Any = jax.device_put(rings.starts)
    assert args.updates is not None
    numbers = jnp.float32(args.prioritise), jnp.float32(IMPORTANCE), jnp.int32(args.updates)
    draws = Prioritised(starts, *numbers, rings.num_slots, args.batch_size)
    return Drawing(kind, windows, weights, draws, record)


def _require_room_for(args: Args, dataset: Dataset | Mixture, windows: Windows) -> None:
    """Raise `OptionError` if no memory holds a batch and its gradients."""
    steps = args.batch_size * (args.length + args.burn_in)
    num_bytes = 2 * steps * layout_of(dataset.spec, windows).slot_bytes
    require_room(num_bytes, f"batches of {args.batch_size:,} windows")


def _weights(args: Args, dataset: Dataset | Mixture, episodes: Chosen) -> Weighting:
    if args.weight is None:
        if args.weight_temperature is not None:
            raise OptionError("--weight-temperature needs --weight: give both.")
        return None
    weights = Weights(args.weight, args.weight_temperature)
    return resolve(dataset, weights, episodes)


def _recorded_vaults(dataset: Dataset | Mixture) -> dict[str, Any]:
    """Return what ``run.json`` says of the vaults of a mixture; nothing for a single vault."""
    if isinstance(dataset, Dataset):
        return {}
    parts = zip(dataset.sources, dataset.shares, strict=True)
    return {
        "vaults": [
            {"vault": f"{data.name}/{data.uid}", "share": share, "digest": data.known_digest()}
            for data, share in parts
        ]
    }
