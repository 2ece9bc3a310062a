"""The cards: each is valid, and together they list all datasets that OG-MARL hosts."""

import pytest

from offmarl import envs
from offmarl.errors import CardError, UnknownNameError
from offmarl.hub import card as catalogue
from offmarl.hub import licences

# The names in OG-MARL's own list of downloads (VAULT_INFO of its vault_utils), and where under
# the repository's root each source is kept.
OG_MARL = {
    "og_marl/smac_v1": "3m 8m 5m_vs_6m 2s3z 3s5z_vs_3s6z",
    "og_marl/smac_v2": "terran_5_vs_5 terran_10_vs_10 zerg_5_vs_5",
    "og_marl/mamujoco": "2halfcheetah 2ant",
    "og_marl/gymnasium_mamujoco": "2ant 2halfcheetah 2walker 3hopper 4ant 6halfcheetah",
    "og_marl/flatland": "20_trains 30_trains",
    "cfcql/smac_v1": "6h_vs_8z 3s_vs_5z 5m_vs_6m 2s3z",
    "alberdice/rware": "small-2ag small-4ag small-6ag tiny-2ag tiny-4ag tiny-6ag",
    "omar/mpe": "simple_spread simple_tag simple_world",
    "omar/mamujoco": "2halfcheetah",
    "omiga/smac_v1": "2c_vs_64zg 6h_vs_8z 5m_vs_6m corridor",
    "omiga/mamujoco": "6halfcheetah 2ant 3hopper",
}
PATHS = {
    f"{group}/{scenario}": f"{group}/{scenario}.zip".replace("og_marl/", "core/", 1)
    if group.startswith("og_marl")
    else f"prior_work/{group}/{scenario}.zip"
    for group, scenarios in OG_MARL.items()
    for scenario in scenarios.split()
}
CARDS = list(catalogue.cards())
MINIMAL = """
name = "a/b/c"
summary = "s"
num_agents = 2
citation = ""
licence = { data = "MIT" }
"""


def test_the_published_cards_are_og_marls_list():
    published = {card.name: card.hub.path for card in CARDS if card.hub}
    assert published == PATHS and len(published) == 39
    assert {card.hub.repository for card in CARDS if card.hub} == {"InstaDeepAI/og-marl"}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_makes_sense(card):
    assert (card.hub is None) != (card.recipe is None)
    assert card.num_agents > 0 and card.citation.strip() and card.licence.data
    assert card.licence.data in licences.HUGGING_FACE
    assert card.action is None or set(card.action) <= {"discrete", "continuous"}
    for uid in card.uids.values():
        if card.time_limit and uid.steps:
            assert uid.steps / uid.episodes <= card.time_limit + 1  # OMIGA's keep one step more
        if uid.return_mean is not None:
            assert uid.return_min <= uid.return_mean <= uid.return_max
            assert uid.steps >= uid.episodes > 0
    if card.hub and card.hub.sha256:
        assert len(card.hub.sha256) == 64 and int(card.hub.sha256, 16)
    if card.recipe:
        assert all(uid.digest and len(uid.digest) == 64 for uid in card.uids.values())
        assert card.recipe.random < card.recipe.expert
    assert catalogue.parse(catalogue.to_toml(card), "written again") == card


def test_no_card_claims_a_licence_that_its_source_does_not_state():
    stated = {card.name: card.licence for card in CARDS}
    for name, licence in stated.items():
        theirs = name.startswith(("alberdice/", "cfcql/", "omar/", "omiga/"))
        humans = "MIT" if name.startswith("overcooked_ai/") else "Apache-2.0"
        assert licence.data == ("unknown" if theirs else humans), name
        assert theirs == bool(licence.note and "The source states no licence" in licence.note)


def test_known_time_limits():
    limits = {card.name: card.time_limit for card in CARDS}
    assert limits["og_marl/smac_v1/3m"] == 60 and limits["cfcql/smac_v1/3s_vs_5z"] == 250
    assert limits["omar/mpe/simple_tag"] == 25 and limits["alberdice/rware/tiny-2ag"] == 500
    assert limits["og_marl/mamujoco/2halfcheetah"] == 1000
    assert limits["og_marl/smac_v2/terran_5_vs_5"] is None, "public sources differ"
    assert limits["og_marl/gymnasium_mamujoco/4ant"] == 1000
    for card in CARDS:
        if card.recipe:
            name = card.recipe.env or f"{card.environment}/{card.scenario}"
            assert card.time_limit == envs.make(name).spec.time_limit
        else:
            warns = any("--time-limit" in sentence for sentence in card.quirks)
            assert warns == (card.time_limit is None), card.name


def test_every_name_is_where_its_card_stands():
    assert [card.name for card in CARDS] == list(catalogue.names())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name =", "is not valid TOML"),
        (MINIMAL.replace('summary = "s"\n', ""), "card is not valid: .* required field summary"),
        (MINIMAL + "colour = 'red'", "card has unknown colour"),
        (MINIMAL + "time_limit = 0", "time_limit: Expected int >= 1"),
        (MINIMAL.replace("2", '"2"'), "num_agents: Expected int, got str"),
        (MINIMAL + "uids = []", "uids: Expected object, got array"),
        (MINIMAL.replace("a/b/c", "c"), "name must be source/environment/scenario"),
        ("x = " + "[" * 100_000, "card is nested too deep"),
        ("x = " + "{a = " * 5_000, "card is nested too deep"),
        (MINIMAL + "action" + ".a" * 20_000 + " = 1", "card is nested too deep"),
        (
            MINIMAL + "uids.a.steps = '" + "x" * 10_000 + "'",
            r"steps: Expected int \| null, got str\.$",
        ),
        (MINIMAL.replace("2", "9" * 5_000), "is not valid TOML: Exceeds the limit"),
        (MINIMAL.replace("2", "0x1" + "0" * 5_000), "num_agents: Expected int <= 65536"),
        (MINIMAL.replace("a/b/c", "a/b/c\\u001b[2J"), "cannot be the name of a dataset"),
    ],
)
def test_a_wrong_card_is_refused_by_name(text, message):
    with pytest.raises(CardError, match=message):
        catalogue.parse(text, "card")


def test_what_is_written_is_read_back():
    name = "Medium Replay.x"
    paths = f"c.vlt/{name}/metadata.json", f"c.vlt/{name}/manifest.ocdbt", f"index/{name}.json.gz"
    files = tuple(catalogue.File(path, 1, "0" * 64) for path in paths)
    uid = catalogue.Uid(1, 2, 0.5, float("inf"), digest="d", files=files)
    card = catalogue.parse(MINIMAL, "card")
    card = catalogue.dataclasses.replace(card, uids={name: uid}, quirks=('a "b"\\\n', "é\x7f"))
    assert catalogue.parse(catalogue.to_toml(card), "card") == card


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean og_marl/smac_v1/3m"):
        catalogue.load("og_marl/smac_v1/3mm")
