"""Trained policies as files that run without offmarl: StableHLO, safetensors and ONNX.

All functions are of named arrays, and batched over environments.
"""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Bool, Float, Int, UInt32

from offmarl._imports import import_optional, quiet, summarize
from offmarl._version import __version__
from offmarl.errors import OptionError
from offmarl.paths import local
from offmarl.tracking import replace_file
from offmarl.trees import unflatten_tree
from offmarl.types import ArrayTree, Discrete

if TYPE_CHECKING:
    from offmarl.programs.runs.policy import LoadedPolicy

_PLATFORMS = ("cpu", "cuda", "tpu")
_Shape: Any = jax.ShapeDtypeStruct

_Named = dict[str, Any]
"""The arrays of a tree, or their shapes, by names such as "params.Dense_0.kernel"."""


def export_policy(loaded: "LoadedPolicy", out: str | Path, onnx: bool = False) -> list[Path]:
    """Write a policy to a directory; see `LoadedPolicy.export`."""
    directory = local(out)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise OptionError(f"{directory} exists and is not empty: give another --out.")
    safetensors = import_optional("safetensors.numpy", "export")
    import_optional("flatbuffers", "export")  # which JAX does not install, though it needs it
    memory = _named("memory", loaded.policy.initial_carry())
    tensors = _named("params", loaded.params) | memory
    inputs, outcome = _shapes(loaded, memory)
    header = {
        "offmarl": __version__,
        "program": loaded.name,
        "stochastic": json.dumps(loaded.stochastic),
        "spec": json.dumps(loaded.spec.to_json()),
    }
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in tensors.items()}
    contents = {"policy.safetensors": safetensors.save(arrays, header)}
    contents["policy.stablehlo"] = _stablehlo(partial(_act, loaded), tensors, *inputs)
    if loaded.policy.after_step is not None:
        contents["after_step.stablehlo"] = _stablehlo(partial(_after_step, loaded), *outcome)
    if onnx:
        contents["policy.onnx"] = _onnx(loaded, tensors, inputs)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_file(directory / name, content)
    return [directory / name for name in contents]


def _act(
    loaded: "LoadedPolicy",
    tensors: _Named,
    observation: ArrayTree,
    legal_actions: Bool[Array, "E N A"],
    memory: _Named,
    key: UInt32[Array, "E 2"] | None = None,
) -> tuple[Array, _Named]:
    """Return the actions in each environment, and the memory after them."""
    params = _tree("params", loaded.params, tensors)

    def act(observation: ArrayTree, legal: Array, memory: _Named, key: Array | None) -> Any:
        carry = _tree("memory", loaded.policy.initial_carry(), memory)
        data = jnp.zeros(2, jnp.uint32) if key is None else key
        wrapped = jax.random.wrap_key_data(data, impl="threefry2x32")
        action, _, carry = loaded.policy.act(params, carry, observation, legal, wrapped)
        return action, _named("memory", carry)

    return jax.vmap(act)(observation, legal_actions, memory, key)


def _after_step(
    loaded: "LoadedPolicy",
    memory: _Named,
    reward: Float[Array, "E N"],
    done: Bool[Array, "E N"],
) -> _Named:
    """Return the memory after the outcome of a step."""

    def after_step(memory: _Named, reward: Array, done: Array) -> _Named:
        assert loaded.policy.after_step is not None
        carry = _tree("memory", loaded.policy.initial_carry(), memory)
        return _named("memory", loaded.policy.after_step(carry, reward, done))

    return jax.vmap(after_step)(memory, reward, done)


def _shapes(loaded: "LoadedPolicy", memory: _Named) -> tuple[list[Any], list[Any]]:
    """Return the shapes of the arguments of `_act`, without tensors, and of `_after_step`."""
    spec, (batch,) = loaded.spec, jax.export.symbolic_shape("batch")

    def batched(dtype: Any, *shape: int) -> Any:
        return _Shape((batch, *shape), dtype)

    leaves = {x: leaf.with_agents(spec.num_agents) for x, leaf in spec.observation_leaves.items()}
    observation = unflatten_tree(
        {path: batched(leaf.numpy_dtype, *leaf.shape) for path, leaf in leaves.items()}
    )
    held = {name: batched(leaf.dtype, *leaf.shape) for name, leaf in memory.items()}
    inputs = [observation, batched(bool, spec.num_agents, spec.action_size), held]
    key = [batched(jnp.uint32, 2)] if loaded.stochastic else []
    outcome = [held, batched(jnp.float32, spec.num_agents), batched(bool, spec.num_agents)]
    return inputs + key, outcome


def _stablehlo(function: Any, *arguments: Any) -> bytes:
    exported = jax.export.export(jax.jit(function), platforms=_PLATFORMS)(*arguments)
    return bytes(exported.serialize())


def _onnx(loaded: "LoadedPolicy", tensors: _Named, inputs: list[Any]) -> bytes:
    """Return a model whose inputs and outputs are named arrays, and whose parameters are inside."""
    policy, spec = loaded.policy, loaded.spec
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
    structure = jax.tree.structure(inputs)

    def act(*arrays: Array) -> list[Array]:
        given = jax.tree.unflatten(structure, arrays)
        action, memory = _act(loaded, tensors, *given)
        scores = [jax.vmap(partial(_log_probs, loaded))(*given)] if likely else []
        return [action, *scores, *jax.tree.leaves(memory)]

    likely = policy.log_prob is not None and isinstance(spec.action, Discrete)
    memory = sorted(inputs[2])
    names = {
        "input_names": [*_named("observation", inputs[0]), "legal_actions", *memory],
        "output_names": ["action", *["log_probs"] * likely, *(f"next_{x}" for x in memory)],
    }
    shapes = [_Shape(("batch", *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(inputs)]
    try:
        with quiet():
            model = jax2onnx.to_onnx(act, shapes, model_name=loaded.name, **names)
    except Exception as error:
        raise OptionError(
            f"jax2onnx cannot convert the policy of {loaded.name} ({summarize(error):.200}): leave "
            "out --onnx."
        ) from error
    return bytes(model.SerializeToString())


def _log_probs(
    loaded: "LoadedPolicy",
    observation: ArrayTree,
    legal_actions: Bool[Array, "N A"],
    memory: _Named,
) -> Float[Array, "N A"]:
    """Return the log-probabilities of all actions of each agent, in one environment."""
    carry = _tree("memory", loaded.policy.initial_carry(), memory)
    num_agents, num_actions = legal_actions.shape

    def of(action: Int[Array, "N"]) -> Float[Array, "N"]:
        assert loaded.policy.log_prob is not None
        return loaded.policy.log_prob(loaded.params, carry, observation, legal_actions, action)[0]

    actions = np.tile(np.arange(num_actions)[:, None], num_agents)
    return jax.vmap(of, out_axes=-1)(jnp.asarray(actions))


def _named(prefix: str, tree: ArrayTree) -> _Named:
    return {_name(prefix, path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _tree(prefix: str, like: ArrayTree, named: _Named) -> ArrayTree:
    """Undo `_named` of a tree with the structure of ``like``."""
    return tree_map_with_path(lambda path, _: named[_name(prefix, path)], like)


def _name(prefix: str, path: Any) -> str:
    return f"{prefix}.{keystr(path, simple=True, separator='.')}" if path else prefix
