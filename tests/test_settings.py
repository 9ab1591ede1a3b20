import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.errors import ConfigError, shown
from ssl_sec.rules import Count, Local, Name, NotEmpty, Range, Share, check
from ssl_sec.settings import Settings as Ruled
from ssl_sec.settings import flattened, from_values, to_values


@dataclass(frozen=True, kw_only=True)
class Circle:
    name: Literal["circle", "disc"]
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Square:
    name: Literal["square"] = "square"
    side: int
    corners: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inner:
    momentum: float = 0.9
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    title: str
    shape: Circle | Square
    count: int = 3
    rate: float = 0.5
    verbose: bool = False
    mode: Literal["fast", "slow"] = "fast"
    channels: Literal[1, 3] = 3
    limit: int | None = None
    note: str | None = None
    rates: tuple[float, ...] = (1.0, 2.0)
    inner: Inner = field(default_factory=Inner)
    shapes: tuple[Circle | Square, ...] = ()
    width: int | str = 1
    maybe: Circle | Square | None = None
    tags: dict[str, str | int] = field(default_factory=dict)


LEAST = {"title": "t", "shape": {"name": "circle"}}


def build(**values):
    return from_values(Settings, {**LEAST, **values})


def message(**values) -> str:
    with pytest.raises(ConfigError) as caught:
        build(**values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_fill_in_missing_values():
    assert build() == Settings(title="t", shape=Circle(name="circle"))


def test_every_kind_of_value_is_accepted():
    settings = build(
        count=4,
        rate=2,
        verbose=True,
        mode="slow",
        channels=1,
        limit=5,
        note="n",
        rates=[1, 2.5],
        inner={"momentum": 0},
        shape={"name": "square", "side": 2, "corners": ["a", "b"]},
        shapes=[{"name": "disc"}, {"name": "square", "side": 1}],
        width="wide",
        maybe={"name": "disc", "radius": 3},
    )
    assert settings == Settings(
        title="t",
        count=4,
        rate=2.0,
        verbose=True,
        mode="slow",
        channels=1,
        limit=5,
        note="n",
        rates=(1.0, 2.5),
        inner=Inner(momentum=0.0),
        shape=Square(side=2, corners=("a", "b")),
        shapes=(Circle(name="disc"), Square(side=1)),
        width="wide",
        maybe=Circle(name="disc", radius=3.0),
    )
    assert [type(value) for value in (settings.rate, settings.rates[0], settings.inner.momentum)] == [float] * 3
    assert build(width=2).width == 2 and build(limit=None, maybe=None) == build()


def test_a_misspelled_key_suggests_the_nearest():
    assert message(cuont=3).startswith("cuont: unknown key; did you mean 'count'?")
    assert message(inner={"momentun": 1}) == (
        "inner.momentun: unknown key; did you mean 'momentum'? allowed: momentum, steps"
    )
    assert message(shape={"name": "disc", "radios": 1}).startswith(
        "shape.radios: unknown key for 'disc'; did you mean 'radius'?"
    )
    assert message(inner={"zzz": 1}) == "inner.zzz: unknown key; allowed: momentum, steps"
    assert message(inner={3: 1}).startswith("inner.3: unknown key")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("count", True, "an integer"),
        ("count", "1", "an integer"),
        ("count", 1.0, "an integer"),
        ("count", None, "an integer"),
        ("rate", True, "a number"),
        ("rate", "0.5", "a number"),
        ("verbose", 1, "true or false"),
        ("verbose", "true", "true or false"),
        ("title", 3, "a string, as '\"3\"'"),
        ("title", None, "a string"),
        ("limit", "5", "an integer"),
        ("limit", False, "an integer"),
        ("note", 3, "a string, as '\"3\"'"),
        ("rates", 1.0, "a list, as in 'rates=[1.0]'"),
        ("rates", "1.0", "a list, as in 'rates=[1.0]'"),
        ("rates", None, "a list"),
        ("inner", 3, "a group of keys"),
        ("inner", None, "a group of keys"),
        ("width", 1.5, "an integer or a string"),
        ("width", True, "an integer or a string"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, allowed):
    assert message(**{key: value}) == f"{key}: found {shown(value)}, must be {allowed}"


def test_items_of_a_list_are_named_by_their_place():
    assert message(rates=[1.0, "x"]) == "rates[1]: found 'x', must be a number"
    assert message(shapes=[{"name": "disc"}, {"name": "square"}]) == "shapes[1].side: missing; it has no default"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("mode", "fats", "did you mean 'fast'? allowed: fast, slow"),
        ("mode", 1, "allowed: fast, slow"),
        ("mode", ["fast"], "allowed: fast, slow"),
        ("channels", 2, "allowed: 1, 3"),
        ("channels", True, "allowed: 1, 3"),
        ("channels", 3.0, "allowed: 1, 3"),
        ("channels", "3", "allowed: 1, 3"),
    ],
)
def test_a_value_outside_a_literal_lists_the_allowed_ones(key, value, hint):
    found = message(**{key: value})
    assert found.startswith(f"{key}: found {shown(value)}; ")
    assert found.endswith(hint)


@pytest.mark.parametrize("name", ["circle", "disc", "square"])
def test_a_union_is_resolved_by_every_name(name):
    shape = build(shape={"name": name, **({"side": 3} if name == "square" else {})}).shape
    assert shape.name == name
    assert isinstance(shape, Square if name == "square" else Circle)


@pytest.mark.parametrize("value", [{"name": "circel"}, {"radius": 1.0}, {"name": None}, {"name": ["circle"]}])
def test_a_union_without_a_known_name_lists_the_names(value):
    found = message(shape=value)
    assert found.startswith(f"shape.name: found {value.get('name')!r}; ")
    assert found.endswith("allowed: circle, disc, square")


def test_a_name_alone_stands_for_its_defaults():
    assert build(shape="circle").shape == build(shape={"name": "circle"}).shape
    assert message(shape="square") == "shape.side: missing; it has no default"
    assert message(shape="circel") == "shape: found 'circel'; did you mean 'circle'? allowed: circle, disc, square"


def test_a_union_of_groups_takes_nothing_else():
    assert message(shape=3).startswith("shape: found 3, must be ")
    assert message(maybe=3).startswith("maybe: found 3, must be ")


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="^shape: missing; it has no default$"):
        from_values(Settings, {"title": "t"})
    assert message(shape={"name": "square"}) == "shape.side: missing; it has no default"
    assert message(shape={"name": "disc"}, inner={"steps": 1, "step": 1}).startswith("inner.step: unknown key")


@pytest.mark.parametrize("values", [None, [], "title", 3])
def test_settings_are_a_group_of_keys(values):
    with pytest.raises(ConfigError, match=r"^config: found .*, must be a group of keys$"):
        from_values(Settings, values)


circles = st.builds(Circle, name=st.sampled_from(["circle", "disc"]), radius=st.floats(allow_nan=False))
squares = st.builds(Square, side=st.integers(), corners=st.lists(st.text()).map(tuple))
shapes = circles | squares
anything = st.builds(
    Settings,
    title=st.text(),
    shape=shapes,
    count=st.integers(),
    rate=st.floats(allow_nan=False),
    verbose=st.booleans(),
    mode=st.sampled_from(["fast", "slow"]),
    channels=st.sampled_from([1, 3]),
    limit=st.none() | st.integers(),
    note=st.none() | st.text(),
    rates=st.lists(st.floats(allow_nan=False)).map(tuple),
    inner=st.builds(Inner, momentum=st.floats(allow_nan=False), steps=st.integers()),
    shapes=st.lists(shapes).map(tuple),
    width=st.integers() | st.text(),
    maybe=st.none() | shapes,
)


@given(settings=anything)
def test_settings_round_trip_to_plain_values(settings):
    values = to_values(settings)
    assert is_plain(values)
    assert from_values(Settings, values) == settings


def is_plain(value) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return (
        all(map(is_plain, value))
        if isinstance(value, list)
        else value is None or type(value) in (str, int, float, bool)
    )


def test_flattening_joins_keys_with_dots():
    values = {"a": 1, "b": {"c": [1, 2], "d": {"e": None}}, "f": {}}
    assert flattened(values) == {"a": 1, "b.c": [1, 2], "b.d.e": None}


@dataclass(frozen=True, kw_only=True)
class Ranged(Ruled, key="ranged"):
    rate: Annotated[float, Range(gt=0, le=2)] = 1.0
    share: Share | None = None
    number: int = 0
    bare: float = 0.0
    counts: Annotated[tuple[Count, ...], NotEmpty()] | Count = 1
    place: Local = "here"
    name: Name = "word"


@dataclass(frozen=True, kw_only=True)
class Outer(Ruled):
    inner: Ranged = field(default_factory=Ranged)
    inners: tuple[Ranged, ...] = ()


BEYOND = [
    ("rate", 0.0, "in (0, 2]"),
    ("rate", 2.5, "in (0, 2]"),
    ("rate", math.nan, "in (0, 2]"),
    ("share", -1.0, "in (0, 1]"),
    ("number", 2**63, "in [-9223372036854775807, 9223372036854775807]"),
    ("bare", math.inf, "a finite number"),
    ("bare", 1e31, "in [-1e+30, 1e+30]"),
    ("counts", 0, "≥ 1"),
    ("counts", (), "one value or more"),
    ("place", "", "a path"),
    ("place", "a\0b", "a path"),
    ("place", "~nobody-of-that-name/x", "a path; the home folder that ~ stands for is not known"),
    ("name", "a/b", "a plain name without slashes"),
    ("name", "a\nb", "a name of at most 200 bytes that can be printed"),
    ("name", "ä" * 101, "a name of at most 200 bytes that can be printed"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), BEYOND)
def test_rules_hold_however_a_config_is_made(key, value, allowed):
    plain = list(value) if isinstance(value, tuple) else value
    expected = f"{key}: found {plain!r}, must be {allowed}"
    for make, path in (
        (lambda: Ranged(**{key: value}), "ranged"),
        (lambda: replace(Ranged(), **{key: value}), "ranged"),
        (lambda: from_values(Ranged, {key: plain}), "ranged"),
        (lambda: from_values(Outer, {"inner": {key: plain}}), "inner"),
        (lambda: from_values(Outer, {"inners": [{}, {key: plain}]}), "inners[1]"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value) == f"{path}.{expected}"


def test_values_within_the_rules_are_accepted():
    kept = Ranged(rate=2.0, share=None, number=2**63 - 1, bare=-1e30, counts=(1, 2), place="~/x/ä", name="ä" * 100)
    assert from_values(Ranged, to_values(kept)) == kept


def test_an_endless_integer_is_refused():
    with pytest.raises(ConfigError, match="^bare: found 10{199}….*0, must be a finite number$"):
        from_values(Ranged, {"bare": 10**400})


@pytest.mark.parametrize("place", ["s3://bucket/runs", "gs://b", "file:///tmp/x", "hdfs://host/x"])
def test_a_url_is_no_path(place):
    with pytest.raises(ConfigError) as caught:
        Ranged(place=place)
    assert str(caught.value) == (
        f"ranged.place: found {place!r}, a URL; must be a path, on a cluster one that all nodes see"
    )


@pytest.mark.parametrize("place", ["a" * 256, "/".join(["a" * 200] * 30)])
def test_a_path_too_long_for_a_file_system_is_refused(place):
    with pytest.raises(ConfigError) as caught:
        Ranged(place=place)
    text = str(caught.value)
    assert text.endswith("must be a path of at most 4096 bytes, with names of at most 255") and len(text) < 600


def test_a_check_names_the_key_the_value_and_the_allowed_ones():
    check(True, "optimiser.momentum", 2.0, "in [0, 1)")
    with pytest.raises(ConfigError, match=r"^optimiser.momentum: found 2.0, must be in \[0, 1\)$"):
        check(False, "optimiser.momentum", 2.0, "in [0, 1)")


def test_a_mapping_has_free_keys_and_values_of_one_type():
    settings = build(tags={"team": "vision", "ticket": 18})
    assert settings.tags == {"team": "vision", "ticket": 18}
    assert from_values(Settings, to_values(settings)) == settings
    assert message(tags={"team": [1]}) == "tags.team: found [1], must be a string or an integer"
    assert message(tags="team") == "tags: found 'team', must be a group of keys"
