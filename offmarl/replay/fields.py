"""The fields of a slot by name, from records of a source to sequences.

The names are those of `Sequence` and `View`. A leaf of a tree has its path behind that, as in
"observation.image" and "extras.cost". Nothing here needs JAX.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import OptionError
from offmarl.replay.sampling import EpisodeTable, Source, Windows
from offmarl.types import (
    ArraySpec,
    Continuous,
    EnvSpec,
    Sequence,
    View,
    flatten_view,
    unflatten_tree,
)

Fields = dict[str, Any]
"""Arrays by the names of fields."""

OF_SLOTS = ("observation", "state", "legal_actions", "alive", "time", "episode")
"""The fields that a sequence has for each of its T+1 slots; of the others it has T."""

COMPUTED = ("time", "episode", "mask", "next_known", "return_to_go", "weight")
"""Fields that do not come from the source."""


@lru_cache(16)
def fields_of(spec: EnvSpec, windows: Windows) -> Mapping[str, ArraySpec]:
    """Return the fields of a slot, as batches have them; cached, since many ask for them."""
    agents, actions = spec.num_agents, spec.action_size
    continuous = isinstance(spec.action, Continuous)
    fields = spec.view_leaves | {
        "action": ArraySpec((agents, actions)) if continuous else ArraySpec((agents,), "int32"),
        "reward": ArraySpec((agents,)),
        "terminated": ArraySpec((agents,), "bool"),
        "truncated": ArraySpec((agents,), "bool"),
        "behaviour_log_prob": ArraySpec((agents,)),
        "time": ArraySpec((), "int32"),
        "episode": ArraySpec((), "int32"),
        "mask": ArraySpec((), "bool"),
        "next_known": ArraySpec((), "bool"),
    }
    if windows.return_to_go is not None:
        fields["return_to_go"] = ArraySpec((agents,))
    names = spec.extras if windows.extras is None else windows.extras
    return fields | {f"extras.{name}": spec.extras[name] for name in names}


def check_extras(spec: EnvSpec, windows: Windows, path: PurePath) -> None:
    """Raise `OptionError` if windows shall carry extras that the data does not have."""
    for name in windows.extras or ():
        if name not in spec.extras:
            raise OptionError(
                f"{path} has no extra column {name!r}: choose from "
                f"{', '.join(spec.extras) or 'none, since it has no extras'}."
            )


class SlotPlace(NamedTuple):
    """Where slots are in their episodes."""

    time: NDArray[np.int64]
    """``(*n,)`` steps of the episode before each."""
    episode: NDArray[np.int64]
    """``(*n,)`` numbers of the episodes."""

    def at(self, index: Any) -> "SlotPlace":
        """Return some of them."""
        return SlotPlace(self.time[index], self.episode[index])


def end_fields(
    place: SlotPlace, source: Source, episodes: EpisodeTable, first_episode: int
) -> Fields:
    """Return the fields of ``n`` slots that end episodes: the episodes' final views.

    All other fields are zero there. An unknown view is zero, too, but allows every action, so that
    every agent has a legal one.
    """
    final = episodes.final[place.episode]
    has_final = final >= 0
    fields = flatten_view(source.final_views(final[has_final]))
    if not has_final.all():
        fields = {name: _spread(values, has_final) for name, values in fields.items()}
        fields["legal_actions"][~has_final] = fields["alive"][~has_final] = True
    return fields | {"time": place.time, "episode": place.episode + first_episode}


def _spread(values: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[Any]:
    """Put values where the mask is true, and zeros elsewhere."""
    array = np.zeros((len(mask), *values.shape[1:]), values.dtype)
    array[mask] = values
    return array


FINISHED = ("action", "alive", "legal_actions", "mask", "terminated", "time", "truncated")
"""The fields that `finish_fields` needs."""


def finish_fields(fields: Fields, windows: Windows) -> Fields:
    """Return fields with those derived from them: ``first``, ``mask`` and corrected ones.

    Burn-in does not count, nor does a step in which an agent that is alive does what its mask
    forbids; the first legal action takes that action's place. An agent with both flags terminated.
    The arrays are NumPy's or JAX's.
    """
    mask = fields["mask"] & (np.arange(windows.steps) >= windows.burn_in)
    derived = {"first": fields["time"] == 0}
    derived["truncated"] = fields["truncated"] & ~fields["terminated"]
    action = fields["action"]
    if action.ndim == mask.ndim + 1:  # discrete
        legal, alive = fields["legal_actions"][..., :-1, :, :], fields["alive"][..., :-1, :]
        arrays = np if isinstance(action, np.ndarray) else action.__array_namespace__()
        inside = (action >= 0) & (action < legal.shape[-1])
        index = arrays.where(inside, action, 0)[..., None]
        illegal = alive & ~(inside & arrays.take_along_axis(legal, index, -1)[..., 0])
        mask = mask & ~illegal.any(-1)
        if arrays is not np or illegal.any():
            derived["action"] = arrays.where(illegal, legal.argmax(-1).astype(action.dtype), action)
    return fields | derived | {"mask": mask}


def to_sequence(fields: Fields) -> Sequence:
    """Build a sequence from finished fields; those of `OF_SLOTS` have T+1 slots."""
    tree = unflatten_tree(fields)
    view = View(**{name: tree.pop(name) for name in View._fields})
    return Sequence(view=view, **tree)


Kinds = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and types of fields."""


def in_windows(leaves: Mapping[str, ArraySpec], windows: Windows) -> Kinds:
    """Return the shapes and types of fields in a window, which has T+1 slots, or T steps."""
    slots, steps = windows.slots, windows.steps
    counts = {name: slots if _is_of_slots(name) else steps for name in leaves}
    return {name: ((counts[name], *x.shape), x.numpy_dtype) for name, x in leaves.items()}


def without_last_slot(fields: Fields) -> Fields:
    """Return the fields of steps from those of T+1 slots, ``(B, T+1, ...)``."""
    return {name: x if _is_of_slots(name) else x[:, :-1] for name, x in fields.items()}


def _is_of_slots(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in OF_SLOTS
