"""What texts stand for as paths, and paths that are made of names from data."""

from pathlib import Path

import pytest

from offmarl import paths
from offmarl.errors import OptionError


@pytest.mark.parametrize(
    ("text", "may_be"),
    [
        *((text, True) for text in ("a/b", "og_marl/smac_v1/3m/Good", "a/b/", "a b/.c")),
        *(
            (text, False)
            for text in ("a", "a/", "/a/b", "a//b", "./a", "a/../b", "~/a", "s3://a/b")
        ),
        *((text, False) for text in ("a.vlt/b", "a/b.vlt", "a/b.zip", "here/too")),
    ],
)
def test_what_may_be_the_name_of_a_dataset(text, may_be, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "too").symlink_to("nowhere")  # something exists there
    assert paths.may_be_name(text) == may_be


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (("a/b", "c"), "a/b/c"),
        (("../../x", "/etc/y"), "x/etc/y"),
        ((".-x", " y "), "x/y"),
        (("a*b\n", "dé-数 (1)[2]+@%"), "a-b-/dé-数 (1)[2]+@%"),
        (("x" * 101,), "x" * 100),
    ],
)
def test_names_from_data_are_safe_paths(names, path):
    assert paths.safe_path(*names, option="--out") == Path(path)


@pytest.mark.parametrize("name", ["", "..", "/", " . ", "./-"])
def test_names_that_cannot_be_paths(name):
    with pytest.raises(OptionError, match="in the data cannot be a path: give --out"):
        paths.safe_path("a", name, option="--out")


def test_the_kind_of_a_file_is_its_suffix():
    assert paths.kind_of(Path("a.b/x.PNG"), ("pdf", "png"), "a figure") == "png"
    message = r"^a figure cannot be written to x\.gif: give a path that ends in \.pdf or \.png\.$"
    with pytest.raises(OptionError, match=message):
        paths.kind_of(Path("x.gif"), ("pdf", "png"), "a figure")


def test_paths_to_one_place_count_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    first, other = tmp_path / "link" / "a", tmp_path / "b"
    assert paths.distinct_paths([first, other, tmp_path / "a", other]) == [first, other]


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_directories_that_were_made_in_vain_are_removed(tmp_path, always, fails):
    (tmp_path / "before").mkdir()
    path = tmp_path / "before" / "made" / "inner"

    def make():
        with paths.no_empty_directories(path, always):
            path.mkdir(parents=True)
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            make()
    else:
        make()
    assert path.exists() == (not always and not fails)
    assert (tmp_path / "before").exists()


def test_caches_are_in_the_home_directory_or_where_the_user_wants(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for value, expected in (("", "/home/me/.cache"), ("~/x", "/home/me/x"), ("/tmp", "/tmp")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert paths.cache_directory("d") == Path(expected) / "offmarl" / "d"
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-has-this-name/x")
    assert paths.cache_directory("d") is None


@pytest.mark.parametrize(("value", "off"), [("off", 1), ("OFF", 1), ("0", 1), ("no", 1), ("1", 0)])
def test_what_turns_something_off(monkeypatch, value, off):
    monkeypatch.delenv("OFFMARL_X", raising=False)
    assert not paths.is_off("OFFMARL_X")
    monkeypatch.setenv("OFFMARL_X", value)
    assert paths.is_off("OFFMARL_X") == bool(off)


def test_paths_are_shown_as_the_arguments_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "_texts", {})
    paths.remember_paths([f"--out={tmp_path}/b", "--flag", "", "-x"])
    places = (tmp_path / "b" / "x", tmp_path / "c", Path("/elsewhere"))
    assert [*map(paths.path_text, places)] == [f"{tmp_path}/b/x", "c", "/elsewhere"]


def test_credentials_of_urls_are_hidden_wherever_they_stand():
    clean = {
        "mixture": ["a@b", "hf://org/name@revision", "RUN@*", "https://host/x@y=0.5"],
        "text": '{"vault": "https://host/x", "weight": "a@b"}',
        "path": "https:/host/a",
        "number": 3,
    }
    assert paths.hide_all_credentials(clean) == clean
    secret = {
        "path": Path("https://u:p@host/a"),
        "words": ("--vault=s3://u:p@host/b", "https://u@host"),
    }
    assert paths.hide_all_credentials(secret) == {
        "path": "https://***@host/a",
        "words": ("--vault=s3://***@host/b", "https://***@host"),
    }
