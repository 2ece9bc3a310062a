"""The table of environments: what each is like, where its class is. Costs nothing to import."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Option = bool | int | float | str

Trait = Literal["partial", "adversarial", "heterogeneous", "communication", "mask"]


@dataclass(frozen=True)
class About:
    """What is known of an environment without building it.

    Parameters
    ----------
    summary
        One line.
    agents
        How many: a number, a capital letter of the name, "any" where an option sets it, or what
        else it depends on.
    traits
        "partial": agents see less than the state. "adversarial": some rewards oppose others, or
        scripted opponents act. "heterogeneous": agents differ in what they see, can do, or are.
        "communication": they have a channel to one another. "mask": some actions are illegal at
        times.
    observation
        "vector", or "grid" where it is one that was flattened.
    action
        "discrete", "continuous", or "both" where an option chooses.
    state
        Whether the global state is the environment's own ("native") or all observations
        ("concatenated").
    extra
        What to install beside offmarl: ``pip install 'offmarl[EXTRA]'``.
    choices
        What a word in capitals in the name stands for.
    """

    summary: str
    agents: str = "2"
    traits: tuple[Trait, ...] = ()
    observation: Literal["vector", "grid"] = "vector"
    action: Literal["discrete", "continuous", "both"] = "discrete"
    state: Literal["native", "concatenated"] = "native"
    extra: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Environments that share a class; each capital letter after a dash stands for a number."""

    name: str
    factory: str
    """``module:attribute`` below ``offmarl.envs``."""
    about: About
    sizes: tuple[str, ...] = ()
    """The arguments that the numbers, or the word, in the name set, in order."""
    fixed: Mapping[str, Option] = field(default_factory=dict)
    """Arguments that are not the user's to choose."""

    @property
    def stem(self) -> str:
        """The name up to its last slash."""
        return self.name.rpartition("/")[0]

    def match(self, name: str) -> dict[str, Option] | None:
        """Return the sizes in a name of this family, None for any other name."""
        if self.about.choices:
            stem, _, choice = name.rpartition("/")
            known = stem == self.stem and choice in self.about.choices
            return {self.sizes[0]: choice} if known else None
        numbers = re.fullmatch(re.sub(r"-[A-Z]\b", r"-(\\d+)", self.name), name, re.ASCII)
        return numbers and dict(zip(self.sizes, map(int, numbers.groups()), strict=True))


_CLASSIC = (
    Family(
        "classic/xor",
        "classic:Xor",
        About("a matrix game: two agents must choose differently"),
    ),
    Family(
        "classic/bridge",
        "classic:Bridge",
        About("two agents cross a bridge wide enough for one"),
    ),
    Family("probe/one-step", "probes:OneStep", About("one action, one reward")),
    Family("probe/two-step", "probes:TwoStep", About("a small reward now or a large one later")),
    Family(
        "probe/observation",
        "probes:Observation",
        About("the right action is the one observed", traits=("partial",)),
    ),
    Family(
        "probe/match",
        "probes:Match",
        About("two agents must choose the same, the better of two"),
    ),
    Family(
        "probe/memory",
        "probes:Memory",
        About("the right action was observed steps ago", traits=("partial",)),
    ),
)

_SWARM_TRAITS: tuple[Trait, ...] = ("partial", "heterogeneous", "communication", "mask")
_SWARM = (
    Family(
        "swarm/coverage-N",
        "swarm.coverage:Coverage",
        About(
            "N drones with short sight keep an area under survey", "N", _SWARM_TRAITS, action="both"
        ),
        sizes=("num_agents",),
    ),
    Family(
        "swarm/search-N",
        "swarm.search:Search",
        About("N drones find wandering targets and hold them", "N", _SWARM_TRAITS, action="both"),
        sizes=("num_agents",),
    ),
    Family(
        "swarm/delivery-N",
        "swarm.delivery:Delivery",
        About(
            "N drones carry loads between sites, heavy ones together",
            "N",
            _SWARM_TRAITS,
            action="both",
        ),
        sizes=("num_agents",),
    ),
    Family(
        "swarm/pursuit-N-M",
        "swarm.pursuit:Pursuit",
        About(
            "N drones hunt M faster ones",
            "N",
            ("adversarial", *_SWARM_TRAITS),
            action="both",
        ),
        sizes=("num_agents", "num_evaders"),
    ),
    Family(
        "swarm/flock-N",
        "swarm.flock:Flock",
        About(
            "N drones fly together through obstacles and wind", "N", _SWARM_TRAITS, action="both"
        ),
        sizes=("num_agents",),
    ),
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

_RIVALS: tuple[Trait, ...] = ("adversarial", "heterogeneous")


def _mpe(task: str, summary: str, agents: str, traits: tuple[Trait, ...] = ()) -> Family:
    """Describe a multi-agent particle environment (Lowe et al. 2017) of JaxMARL."""
    facmac = "facmac" in task
    about = About(
        summary,
        agents,
        traits,
        action="continuous" if facmac else "both",
        state="native" if facmac else "concatenated",
        extra="envs",
    )
    fixed = {"env_id": f"MPE_{task}"}
    return Family(f"jaxmarl/mpe/{task}", "jaxmarl:JaxMarl", about, fixed=fixed)


_MPE = (
    _mpe("simple_v3", "one particle goes to a landmark", "1"),
    _mpe("simple_spread_v3", "particles spread over landmarks", "any"),
    _mpe("simple_tag_v3", "slow predators hunt faster prey", "any", _RIVALS),
    _mpe("simple_adversary_v3", "two hide from a third which landmark is theirs", "3", _RIVALS),
    _mpe("simple_push_v3", "an adversary pushes an agent off its target", "2", _RIVALS),
    _mpe(
        "simple_crypto_v3",
        "two share a secret that a third overhears",
        "3",
        (*_RIVALS, "partial", "communication"),
    ),
    _mpe(
        "simple_speaker_listener_v4",
        "one knows the target, the other moves",
        "2",
        ("partial", "heterogeneous", "communication"),
    ),
    _mpe(
        "simple_reference_v3",
        "two move, and tell each other where to",
        "2",
        ("partial", "communication"),
    ),
    _mpe(
        "simple_world_comm_v3",
        "predators with a leader hunt prey among forests",
        "any",
        (*_RIVALS, "partial", "communication"),
    ),
    *(
        _mpe(
            f"simple_facmac{size}_v1",
            f"{predators} predators hunt {prey} prey, each in sight of a few",
            f"{predators + prey}",
            (*_RIVALS, "partial"),
        )
        for size, predators, prey in (("", 3, 1), ("_3a", 3, 1), ("_6a", 6, 2), ("_9a", 9, 3))
    ),
)


def _jaxmarl(name: str, env_id: str, about: About, *sizes: str) -> Family:
    return Family(f"jaxmarl/{name}", "jaxmarl:JaxMarl", about, sizes, {"env_id": env_id})


def _smax(name: str, env_id: str, summary: str) -> Family:
    about = About(
        summary,
        "map",
        ("partial", *_RIVALS, "mask"),
        action="both",
        extra="envs",
        choices=SMAX_MAPS,
    )
    return _jaxmarl(name, env_id, about, "scenario")


def _overcooked(name: str, env_id: str, choices: tuple[str, ...]) -> Family:
    about = About(
        "cooks share a kitchen",
        "layout" if env_id == "overcooked_v2" else "2",
        observation="grid",
        state="concatenated",
        extra="envs",
        choices=choices,
    )
    return _jaxmarl(name, env_id, about, "layout")


def _storm(name: str, summary: str, agents: str) -> Family:
    about = About(
        summary,
        agents,
        ("partial", "adversarial"),
        observation="grid",
        state="concatenated",
        extra="envs",
    )
    return _jaxmarl(name, name, about)


def _mabrax(name: str, body: str, agents: str) -> Family:
    about = About(
        f"the joints of {body}, shared out among {agents} agents",
        agents,
        ("partial", "heterogeneous"),
        action="continuous",
        extra="mabrax",
    )
    return _jaxmarl(f"mabrax/{name.replace('|', '_')}", name, about)


_JAXMARL = (
    _smax("smax/MAP", "HeuristicEnemySMAX", "allies fight scripted enemies, as in StarCraft"),
    _smax("smax_self_play/MAP", "SMAX", "the same battle; both sides learn"),
    _overcooked("overcooked/LAYOUT", "overcooked", OVERCOOKED_LAYOUTS),
    _overcooked("overcooked_v2/LAYOUT", "overcooked_v2", OVERCOOKED_V2_LAYOUTS),
    _jaxmarl(
        "jaxnav",
        "jaxnav",
        About(
            "robots with lidar find their goals", "any", ("partial",), action="both", extra="envs"
        ),
    ),
    _jaxmarl(
        "hanabi",
        "hanabi",
        About(
            "a card game of hints, played by turns",
            "any",
            ("partial", "communication", "mask"),
            state="concatenated",
            extra="envs",
        ),
    ),
    _jaxmarl(
        "switch_riddle",
        "switch_riddle",
        About(
            "prisoners share one light bulb",
            "any",
            ("partial", "communication"),
            state="concatenated",
            extra="envs",
        ),
    ),
    _jaxmarl(
        "coin_game",
        "coin_game",
        About(
            "two collect coins on a small grid; taking the other's hurts it",
            "2",
            ("adversarial",),
            "grid",
            state="concatenated",
            extra="envs",
        ),
    ),
    _storm("storm", "a matrix game played out on a grid", "any"),
    _storm("storm_2p", "the same for two", "2"),
    _storm("storm_np", "the same, zapping at a distance", "any"),
    _mabrax("ant_4x2", "an ant", "4"),
    _mabrax("halfcheetah_6x1", "a half-cheetah", "6"),
    _mabrax("hopper_3x1", "a hopper", "3"),
    _mabrax("humanoid_9|8", "a humanoid", "2"),
    _mabrax("walker2d_2x3", "a walker", "2"),
)


def _jumanji(name: str, factory: str, about: About) -> Family:
    return Family(f"jumanji/{name}", f"jumanji:{factory}", about)


_JUMANJI = (
    _jumanji(
        "robot_warehouse",
        "RobotWarehouse",
        About(
            "robots bring requested shelves",
            "any",
            ("partial", "mask"),
            state="concatenated",
            extra="envs",
        ),
    ),
    _jumanji(
        "lbf",
        "LevelBasedForaging",
        About(
            "foragers of several levels collect food together",
            "any",
            ("partial", "heterogeneous", "mask"),
            state="concatenated",
            extra="envs",
        ),
    ),
    _jumanji(
        "search_and_rescue",
        "SearchAndRescue",
        About(
            "searchers fly over an area and find moving targets",
            "any",
            ("partial",),
            action="continuous",
            state="concatenated",
            extra="envs",
        ),
    ),
    _jumanji(
        "connector",
        "Connector",
        About("agents draw paths to their ends", "any", ("mask",), "grid", extra="envs"),
    ),
    _jumanji(
        "cleaner",
        "Cleaner",
        About("agents clean a maze", "any", ("mask",), "grid", extra="envs"),
    ),
    _jumanji(
        "multi_cvrp",
        "MultiCvrp",
        About("vehicles serve customers in time", "any", ("mask",), extra="envs"),
    ),
)


def _matrax(name: str, summary: str, *sizes: str) -> Family:
    about = About(summary, extra="envs")
    fixed = {"game": name.partition("-K")[0]}
    return Family(f"matrax/{name}", "matrix:Matrax", about, sizes, fixed)


_MATRAX = (
    _matrax("climbing", "a 3x3 matrix game whose best outcome lies beside the worst"),
    _matrax("penalty-K", "a matrix game where failing to coordinate costs K", "number"),
    _matrax("no-conflict-K", "a 2x2 game: both prefer the same outcome", "number"),
    _matrax("conflict-K", "a 2x2 game: each prefers another outcome", "number"),
)

FAMILIES = (*_CLASSIC, *_SWARM, *_MPE, *_JAXMARL, *_JUMANJI, *_MATRAX)
