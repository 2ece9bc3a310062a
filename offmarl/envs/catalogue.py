"""The table of built-in environments: names, properties and classes. Imports no JAX."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any, Literal

Option = bool | int | float | str

Trait = Literal["partial", "adversarial", "heterogeneous", "communication", "mask"]


@dataclass(frozen=True)
class EnvInfo:
    """Properties of an environment, known without creating it.

    Parameters
    ----------
    summary
        One line.
    agents
        Number of agents: a number, a capital letter of the name, "any" if an option sets it, or
        what it depends on. Empty if unknown.
    traits
        "partial": agents observe less than the state. "adversarial": some rewards oppose others,
        or scripted opponents act. "heterogeneous": agents differ in observations, actions or
        abilities. "communication": agents have a channel to each other. "mask": some actions are
        illegal at times.
    observation
        "vector"; "grid" for an image of integers or booleans, channels last; or "tree" for a
        dictionary of arrays. None if unknown.
    action
        "discrete", "continuous", or "both" if an option chooses; None if unknown.
    state
        "native": the environment has its own global state. "concatenated": the state is all
        observations. None if unknown.
    extra
        Optional dependency that it needs: ``pip install 'offmarl[EXTRA]'``.
    choices
        Values for the word in capitals in the name.
    """

    summary: str
    agents: str = ""
    traits: tuple[Trait, ...] = ()
    observation: Literal["vector", "grid", "tree"] | None = None
    action: Literal["discrete", "continuous", "both"] | None = None
    state: Literal["native", "concatenated"] | None = None
    extra: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Environments with one factory; in the name, a capital letter after a dash is a number."""

    name: str
    factory: str | EntryPoint | Callable[..., Any]
    """A callable that returns the environment, or ``module:attribute`` to import it from."""
    about: EnvInfo
    sizes: tuple[str, ...] | None = None
    """Arguments set by the numbers or the word in the name, in order; None for the factory's
    arguments without a default."""
    source: str = "offmarl"
    """Where it is defined: offmarl, a package with its version, or a file or module."""
    fixed: Mapping[str, Option] = field(default_factory=dict)
    """Arguments that users cannot change."""

    @property
    def stem(self) -> str:
        """The name up to its last slash."""
        return self.name.rpartition("/")[0]

    def match(self, name: str) -> tuple[Option, ...] | None:
        """Return the numbers or the word in a name of this family; None for any other name."""
        if self.about.choices:
            stem, _, choice = name.rpartition("/")
            return (choice,) if stem == self.stem and choice in self.about.choices else None
        pattern = re.sub(r"\\-[A-Z]\b", lambda _: r"-(\d+)", re.escape(self.name))
        numbers = re.fullmatch(pattern, name, re.ASCII)
        return numbers and tuple(map(int, numbers.groups()))


_BUILT_IN = EnvInfo("", "2", observation="vector", action="discrete", state="native")


def _family(name: str, factory: str, *sizes: str, fixed: Any = None, **about: Any) -> Family:
    """Describe a built-in environment; ``about`` holds what differs from `_BUILT_IN`."""
    info = replace(_BUILT_IN, **about)
    return Family(name, f"offmarl.envs.{factory}", info, sizes, fixed=fixed or {})


_CLASSIC = (
    _family(
        "classic/xor",
        "classic:Xor",
        summary="a matrix game: two agents must choose different actions",
    ),
    _family(
        "classic/bridge",
        "classic:Bridge",
        summary="two agents cross a bridge wide enough for one",
    ),
)


def _probe(name: str, env_class: str, summary: str, **about: Any) -> Family:
    return _family(f"probe/{name}", f"probes:{env_class}", summary=summary, action="both", **about)


_PROBES = (
    _probe("one-step", "OneStep", "one action, one reward"),
    _probe("two-step", "TwoStep", "a small reward now or a large one later"),
    _probe(
        "observation", "Observation", "the right action is the one observed", traits=("partial",)
    ),
    _probe("match", "Match", "two agents must choose the same action, the better of two"),
    _probe("memory", "Memory", "the right action was observed some steps ago", traits=("partial",)),
)


def _swarm(
    task: str, env_class: str, summary: str, *sizes: str, more: tuple[Trait, ...] = ()
) -> Family:
    return _family(
        f"swarm/{task}",
        f"swarm.{task.partition('-')[0]}:{env_class}",
        "num_agents",
        *sizes,
        summary=summary,
        agents="N",
        traits=(*more, "partial", "heterogeneous", "communication", "mask"),
        action="both",
    )


_SWARM = (
    _swarm("coverage-N", "Coverage", "N drones with short sight survey an area"),
    _swarm("search-N", "Search", "N drones find moving targets and hold them"),
    _swarm(
        "delivery-N",
        "Delivery",
        "N drones carry loads between sites; heavy loads need several drones",
    ),
    _swarm(
        "pursuit-N-M",
        "Pursuit",
        "N drones hunt M faster drones",
        "num_evaders",
        more=("adversarial",),
    ),
    _swarm("flock-N", "Flock", "N drones fly together through obstacles and wind"),
    _swarm("hover-N", "Hover", "N quadrotors fly to goals and hover there"),
)

SMAX_MAPS = (
    "2s3z",
    "3m",
    "3s5z",
    "3s5z_vs_3s6z",
    "3s_vs_5z",
    "5m_vs_6m",
    "6h_vs_8z",
    "8m",
    "10m_vs_11m",
    "25m",
    "27m_vs_30m",
    "smacv2_5_units",
    "smacv2_10_units",
    "smacv2_20_units",
)
OVERCOOKED_LAYOUTS = (
    "asymm_advantages",
    "coord_ring",
    "counter_circuit",
    "cramped_room",
    "forced_coord",
)
OVERCOOKED_V2_LAYOUTS = (
    *OVERCOOKED_LAYOUTS,
    "asymm_advantages_recipes_center",
    "asymm_advantages_recipes_left",
    "asymm_advantages_recipes_right",
    "cramped_room_v2",
    "demo_cook_simple",
    "demo_cook_wide",
    "fun_coordination",
    "fun_symmetries",
    "fun_symmetries1",
    "fun_symmetries_plates",
    "grounded_coord_ring",
    "grounded_coord_simple",
    "long_room",
    "more_fun_coordination",
    "test_time_simple",
    "test_time_wide",
    "two_rooms",
    "two_rooms_both",
)


def _jaxmarl(
    name: str, env_class: str, compat: str, *sizes: str, env_id: str = "", **about: Any
) -> Family:
    """Describe an environment of JaxMARL."""
    fixed = {"env_id": env_id or name, "env_class": env_class, "compat": compat}
    about = {"extra": "envs"} | about
    return _family(f"jaxmarl/{name}", "jaxmarl:JaxMarl", *sizes, fixed=fixed, **about)


_RIVALS: tuple[Trait, ...] = ("adversarial", "heterogeneous")


def _mpe(
    task: str,
    env_class: str,
    summary: str,
    agents: str,
    traits: tuple[Trait, ...] = (),
    compat: str = "",
) -> Family:
    """Describe a multi-agent particle environment (Lowe et al. 2017)."""
    facmac = compat == "mpe_facmac"
    compat = compat or ("mpe_rivals" if "adversarial" in traits else "mpe")
    return _jaxmarl(
        f"mpe/{task}",
        env_class,
        compat,
        env_id=f"MPE_{task}",
        summary=summary,
        agents=agents,
        traits=traits,
        action="continuous" if facmac else "both",
        state="native" if facmac else "concatenated",
    )


def _facmac(suffix: str, env_class: str, predators: int, prey: int) -> Family:
    summary = f"{predators} predators hunt {prey} prey; each observes a few of the others"
    traits: tuple[Trait, ...] = (*_RIVALS, "partial")
    task, agents = f"simple_facmac{suffix}_v1", f"{predators + prey}"
    return _mpe(task, env_class, summary, agents, traits, "mpe_facmac")


_MPE = (
    _mpe("simple_v3", "SimpleMPE", "one particle goes to a landmark", "1"),
    _mpe("simple_spread_v3", "SimpleSpreadMPE", "particles spread over landmarks", "any"),
    _mpe("simple_tag_v3", "SimpleTagMPE", "slow predators hunt faster prey", "any", _RIVALS),
    _mpe(
        "simple_adversary_v3",
        "SimpleAdversaryMPE",
        "two agents hide from a third which landmark is theirs",
        "3",
        _RIVALS,
    ),
    _mpe(
        "simple_push_v3",
        "SimplePushMPE",
        "an adversary pushes an agent off its target",
        "2",
        _RIVALS,
    ),
    _mpe(
        "simple_crypto_v3",
        "SimpleCryptoMPE",
        "two agents share a secret that a third overhears",
        "3",
        (*_RIVALS, "partial", "communication"),
    ),
    _mpe(
        "simple_speaker_listener_v4",
        "SimpleSpeakerListenerMPE",
        "one agent knows the target, the other moves",
        "2",
        ("partial", "heterogeneous", "communication"),
        "mpe_team",
    ),
    _mpe(
        "simple_reference_v3",
        "SimpleReferenceMPE",
        "two agents move, and tell each other their targets",
        "2",
        ("partial", "communication"),
    ),
    _mpe(
        "simple_world_comm_v3",
        "SimpleWorldCommMPE",
        "predators with a leader hunt prey among forests",
        "any",
        (*_RIVALS, "partial", "communication"),
    ),
    _facmac("", "SimpleFacmacMPE", 3, 1),
    _facmac("_3a", "SimpleFacmacMPE3a", 3, 1),
    _facmac("_6a", "SimpleFacmacMPE6a", 6, 2),
    _facmac("_9a", "SimpleFacmacMPE9a", 9, 3),
)


def _smax(name: str, env_class: str, compat: str, summary: str) -> Family:
    return _jaxmarl(
        f"{name}/MAP",
        env_class,
        compat,
        "scenario",
        env_id=env_class,
        summary=summary,
        agents="map",
        traits=("partial", *_RIVALS, "mask"),
        action="both",
        choices=SMAX_MAPS,
    )


def _overcooked(name: str, env_class: str, agents: str, choices: tuple[str, ...]) -> Family:
    return _jaxmarl(
        f"{name}/LAYOUT",
        env_class,
        name,
        "layout",
        env_id=name,
        summary="cooks share a kitchen",
        agents=agents,
        observation="grid",
        state="concatenated",
        choices=choices,
    )


def _storm(
    name: str, env_class: str, summary: str, agents: str, observation: str = "tree"
) -> Family:
    return _jaxmarl(
        name,
        env_class,
        name,
        summary=summary,
        agents=agents,
        traits=("partial", "adversarial"),
        observation=observation,
        state="concatenated",
    )


def _mabrax(env_id: str, env_class: str, body: str, agents: str) -> Family:
    return _jaxmarl(
        f"mabrax/{env_id.replace('|', '_')}",
        env_class,
        "mabrax",
        env_id=env_id,
        summary=f"{agents} agents share the joints of {body}",
        agents=agents,
        traits=("partial", "heterogeneous"),
        action="continuous",
        extra="mabrax",
    )


_JAXMARL = (
    _smax(
        "smax",
        "HeuristicEnemySMAX",
        "smax",
        "allies fight scripted enemies, as in StarCraft",
    ),
    _smax("smax_self_play", "SMAX", "smax_self_play", "the same battle; both sides learn"),
    _overcooked("overcooked", "Overcooked", "2", OVERCOOKED_LAYOUTS),
    _overcooked("overcooked_v2", "OvercookedV2", "layout", OVERCOOKED_V2_LAYOUTS),
    _jaxmarl(
        "jaxnav",
        "JaxNav",
        "jaxnav",
        summary="robots with lidar find their goals",
        agents="any",
        traits=("partial",),
        action="both",
    ),
    _jaxmarl(
        "hanabi",
        "Hanabi",
        "hanabi",
        summary="a card game of hints, played in turns",
        agents="any",
        traits=("partial", "communication", "mask"),
        state="concatenated",
    ),
    _jaxmarl(
        "switch_riddle",
        "SwitchRiddle",
        "switch_riddle",
        summary="prisoners share one light bulb",
        agents="any",
        traits=("partial", "communication"),
        state="concatenated",
    ),
    _jaxmarl(
        "coin_game",
        "CoinGame",
        "coin_game",
        summary="two agents collect coins on a small grid; taking the other's coin hurts it",
        traits=("adversarial",),
        state="concatenated",
    ),
    _storm("storm", "InTheGrid", "a matrix game played on a grid", "any"),
    _storm("storm_2p", "InTheGrid_2p", "the same for two agents", "2"),
    _storm("storm_np", "InTheMatrix", "the same, with zapping at a distance", "any", "grid"),
    _mabrax("ant_4x2", "Ant", "an ant", "4"),
    _mabrax("halfcheetah_6x1", "HalfCheetah", "a half-cheetah", "6"),
    _mabrax("hopper_3x1", "Hopper", "a hopper", "3"),
    _mabrax("humanoid_9|8", "Humanoid", "a humanoid", "2"),
    _mabrax("walker2d_2x3", "Walker2d", "a walker", "2"),
)


def _jumanji(name: str, env_class: str, summary: str, **about: Any) -> Family:
    about = {"agents": "any", "extra": "envs"} | about
    return _family(f"jumanji/{name}", f"jumanji:{env_class}", summary=summary, **about)


_JUMANJI = (
    _jumanji(
        "robot_warehouse",
        "RobotWarehouse",
        "robots bring requested shelves",
        traits=("partial", "mask"),
        state="concatenated",
    ),
    _jumanji(
        "lbf",
        "LevelBasedForaging",
        "foragers of different levels collect food together",
        traits=("partial", "heterogeneous", "mask"),
        state="concatenated",
    ),
    _jumanji(
        "search_and_rescue",
        "SearchAndRescue",
        "searchers fly over an area and find moving targets",
        traits=("partial",),
        action="continuous",
        state="concatenated",
    ),
    _jumanji(
        "connector",
        "Connector",
        "agents draw paths to their targets",
        traits=("mask",),
        observation="grid",
    ),
    _jumanji("cleaner", "Cleaner", "agents clean a maze", traits=("mask",), observation="grid"),
    _jumanji("multi_cvrp", "MultiCvrp", "vehicles serve customers in time", traits=("mask",)),
)


def _matrax(name: str, summary: str, *sizes: str) -> Family:
    fixed = {"game": name.partition("-K")[0]}
    about = {"summary": summary, "extra": "envs"}
    return _family(f"matrax/{name}", "classic:Matrax", *sizes, fixed=fixed, **about)


_MATRAX = (
    _matrax("climbing", "a 3x3 matrix game with the best outcome next to the worst"),
    _matrax("penalty-K", "a matrix game where failing to coordinate costs K", "number"),
    _matrax("no-conflict-K", "a 2x2 game: both agents prefer the same outcome", "number"),
    _matrax("conflict-K", "a 2x2 game: the agents prefer different outcomes", "number"),
)

BUILT_IN = (*_CLASSIC, *_PROBES, *_SWARM, *_MPE, *_JAXMARL, *_JUMANJI, *_MATRAX)
