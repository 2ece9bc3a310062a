"""Trained policies as files that run without offmarl: StableHLO, safetensors and ONNX.

The functions are of one environment, with named arrays; they are exported batched.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Bool, Float, UInt32

from offmarl._imports import import_optional, quiet, summarize
from offmarl._version import __version__
from offmarl.errors import OptionError
from offmarl.paths import local_output
from offmarl.tracking import replace_file
from offmarl.types import ArrayTree, Discrete, map_tree

if TYPE_CHECKING:
    from offmarl.programs.runs.policy import LoadedPolicy

_Shape: Any = jax.ShapeDtypeStruct
_Named = dict[str, Any]
"""The arrays of a tree, or their shapes, by names such as "params.Dense_0.kernel"."""


def export_policy(loaded: "LoadedPolicy", out: str | Path, onnx: bool) -> list[Path]:
    """Write a policy to a directory; see `LoadedPolicy.export`."""
    directory = local_output(out)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise OptionError(f"{directory} exists and is not empty: give another --out.")
    safetensors = import_optional("safetensors.numpy", "export")
    import_optional("flatbuffers", "export")  # which JAX does not install, though it needs it
    memory = _named("memory", loaded.policy.initial_carry())
    tensors = _named("params", loaded.params) | memory
    about = {"program": loaded.name, "stochastic": json.dumps(loaded.stochastic)}
    header = {"offmarl": __version__, "spec": json.dumps(loaded.spec.to_json()), **about}
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in tensors.items()}

    views = loaded.spec.view_spec
    observation = map_tree(lambda leaf: _batched(leaf.shape, leaf.numpy_dtype), views.observation)
    memory_shapes = {name: _batched(leaf.shape, leaf.dtype) for name, leaf in memory.items()}
    inputs = [observation, _batched(views.legal_actions.shape, bool), memory_shapes]
    key = [_batched((2,), jnp.uint32)] if loaded.stochastic else []
    contents = {
        "policy.safetensors": safetensors.save(arrays, header),
        "policy.stablehlo": _stablehlo(partial(_act, loaded), [tensors], inputs + key),
    }
    if loaded.policy.after_step is not None:
        outcome = [_batched(views.alive.shape, dtype) for dtype in (jnp.float32, bool)]
        function = partial(_after_step, loaded)
        contents["after_step.stablehlo"] = _stablehlo(function, [], [memory_shapes, *outcome])
    if onnx:
        contents["policy.onnx"] = _onnx(loaded, tensors, inputs)
    for name, content in contents.items():
        replace_file(directory / name, content)
    return [directory / name for name in contents]


def _act(
    loaded: "LoadedPolicy",
    tensors: _Named,
    observation: ArrayTree,
    legal: Bool[Array, "N A"],
    memory: _Named,
    key: UInt32[Array, "2"] | None = None,
) -> tuple[Array, _Named]:
    """Return the actions, and the memory after them."""
    params, carry = _tree("params", loaded.params, tensors), _carry(loaded, memory)
    data = jnp.zeros(2, jnp.uint32) if key is None else key
    prng_key = jax.random.wrap_key_data(data, impl="threefry2x32")
    action, _, carry = loaded.policy.act(params, carry, observation, legal, prng_key)
    return action, _named("memory", carry)


def _after_step(loaded: "LoadedPolicy", memory: _Named, reward: Array, done: Array) -> _Named:
    assert loaded.policy.after_step is not None
    return _named("memory", loaded.policy.after_step(_carry(loaded, memory), reward, done))


def _log_probs(
    loaded: "LoadedPolicy", observation: ArrayTree, legal: Bool[Array, "N A"], memory: _Named
) -> Float[Array, "N A"]:
    """Return the log-probabilities of all actions of each agent."""
    log_prob: Any = loaded.policy.log_prob
    inputs = loaded.params, _carry(loaded, memory), observation, legal
    actions = jnp.asarray(np.tile(np.arange(legal.shape[1])[:, None], legal.shape[0]))
    return jax.vmap(lambda action: log_prob(*inputs, action)[0], out_axes=-1)(actions)


def _stablehlo(function: Any, shared: list[Any], batched: list[Any]) -> bytes:
    axes: list[Any] = [None] * len(shared) + [0] * len(batched)
    compiled = jax.jit(jax.vmap(function, axes))
    exported = jax.export.export(compiled, platforms=("cpu", "cuda", "tpu"))(*shared, *batched)
    return bytes(exported.serialize())


def _onnx(loaded: "LoadedPolicy", tensors: _Named, inputs: list[Any]) -> bytes:
    """Return a model whose inputs and outputs are named arrays, and whose parameters are inside."""
    policy, structure, memory = loaded.policy, jax.tree.structure(inputs), sorted(inputs[2])
    reasons = {
        "its agents choose after one another": policy.joint,
        "it takes rewards as input": policy.after_step is not None,
        "it draws random numbers": loaded.stochastic,
    }
    if reason := next((text for text, holds in reasons.items() if holds), None):
        raise OptionError(
            f"the policy of {loaded.name} cannot be written as ONNX, since {reason}: leave out "
            "--onnx. StableHLO has all policies."
        )
    jax2onnx = import_optional("jax2onnx", "onnx")
    likely = policy.log_prob is not None and isinstance(loaded.spec.action, Discrete)

    def act(*arrays: Array) -> list[Array]:
        arguments = jax.tree.unflatten(structure, arrays)
        action, after = jax.vmap(partial(_act, loaded, tensors))(*arguments)
        scores = [jax.vmap(partial(_log_probs, loaded))(*arguments)] if likely else []
        return [action, *scores, *jax.tree.leaves(after)]

    shapes = [_Shape(("batch", *x.shape[1:]), x.dtype) for x in jax.tree.leaves(inputs)]
    names = {
        "input_names": [*_named("observation", inputs[0]), "legal_actions", *memory],
        "output_names": ["action", *["log_probs"] * likely, *(f"next_{x}" for x in memory)],
    }
    try:
        with quiet():
            model = jax2onnx.to_onnx(act, shapes, model_name=loaded.name, **names)
    except Exception as error:
        raise OptionError(
            f"jax2onnx cannot convert the policy of {loaded.name} ({summarize(error):.200}): leave "
            "out --onnx."
        ) from error
    return bytes(model.SerializeToString())


def _batched(shape: tuple[int, ...], dtype: Any) -> Any:
    return _Shape((*_batch(), *shape), dtype)


@cache
def _batch() -> Any:
    """Return the number of environments, which is the same symbol in all shapes."""
    return jax.export.symbolic_shape("batch")


def _carry(loaded: "LoadedPolicy", memory: _Named) -> ArrayTree:
    return _tree("memory", loaded.policy.initial_carry(), memory)


def _named(prefix: str, tree: ArrayTree) -> _Named:
    return {_name(prefix, path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _tree(prefix: str, like: ArrayTree, arrays: _Named) -> ArrayTree:
    """Undo `_named` of a tree with the structure of ``like``."""
    return tree_map_with_path(lambda path, _: arrays[_name(prefix, path)], like)


def _name(prefix: str, path: Any) -> str:
    return f"{prefix}.{keystr(path, simple=True, separator='.')}" if path else prefix
