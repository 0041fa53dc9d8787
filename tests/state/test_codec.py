"""gym-session-v1: what comes back is what was there, and what can't come back is refused where it is."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import itertools
import math
import pathlib
import random
import re
import string
import subprocess
import sys
import threading
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from participant_shims.gate.state import codec
from tests.examples import examples
from tests.state import samples
from tests.state.samples import SCOPE, Board, Colour, Frozen, Label, Message, MixedSlots, Names, Point, Rights, same


def there_and_back(value: Any) -> Any:
    return codec.decode(codec.loads(codec.dumps(codec.encode(value, SCOPE))), SCOPE)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))  # lone surrogates too
    | st.text(string.ascii_letters, min_size=90, max_size=140)
    | st.binary(max_size=1200)
    | st.decimals()
    | st.fractions()
    | st.uuids()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.sampled_from([*Colour, Rights.READ, Rights.READ | Rights.RUN, Rights(0), int, Board, samples.double, ...])
)
keys = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.tuples(st.integers(), st.text(max_size=3))
    | st.floats(allow_nan=False)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.lists(inner, max_size=4).map(lambda v: deque(v, maxlen=9))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(lambda a, b: Message.model_construct(role="r", content=a, other=b), inner, inner)
    ),
    max_leaves=25,
)


@settings(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_every_value_comes_back_with_its_type_order_and_bits(value: Any) -> None:
    back = there_and_back(value)
    assert same(value, back)
    saved = codec.encode(value, SCOPE)
    if not {"st", "fs"} & {
        entry[0] for entry in saved["objects"]
    }:  # a set has no order that can be given back for sure
        assert codec.encode(back, SCOPE) == saved


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        10**5000,
        "\ud83d\ude00",  # two lone surrogates, which JSON alone would merge into one character
        b"x" * 100_000,
        bytearray(b"ab"),
        range(1, 9, 2),
        slice(1, None, 3),
        Decimal("-0E+5"),
        Decimal("sNaN123"),
        Fraction(-7, 3),
        dt.datetime(2026, 10, 25, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
        dt.timezone(dt.timedelta(hours=2), "here"),
        dt.time(3, 4, 5, 6, tzinfo=dt.UTC),
        pathlib.PurePosixPath("a/b"),
        pathlib.Path("/x"),
        pathlib.PureWindowsPath(r"c:\x"),
        re.compile(r"a(b)?", re.I | re.S),
        Counter("abca"),
        Point(1, 2),
        Frozen("f", (1,)),
        frozenset([1, (2, "x")]),
        {Point(1, 2): "p", Colour.RED: 2, frozenset([3]): 4},
        Label("text"),
        np.float32(0.1),
        np.datetime64("2026-01-02T03", "h"),
        np.str_("é"),
        np.bool_(True),
        pd.Timestamp("2026-03-29 01:30", tz="Europe/Berlin"),
        pd.Timedelta("1 day 00:00:00.000000007"),
        uuid.UUID(int=5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_special_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    if isinstance(value, Decimal | float):
        assert repr(back) == repr(value)
    else:
        assert back == value
    if isinstance(value, dt.datetime):
        assert back.fold == value.fold
        assert back.tzinfo is value.tzinfo


def test_the_order_of_a_dictionary_survives() -> None:
    assert list(there_and_back({"z": 1, "a": 2, 3: 4, "m": 5})) == ["z", "a", 3, "m"]


def test_shared_references_and_cycles_keep_their_identity() -> None:
    shared = [1]
    loop: dict[str, Any] = {"one": shared, "two": shared, "pair": (shared,)}
    loop["self"] = loop
    board = Board(2)
    board.owner = loop  # type: ignore[attr-defined]
    loop["board"] = board
    back = there_and_back(loop)
    assert back["one"] is back["two"] is back["pair"][0]
    assert back["self"] is back
    assert back["board"].owner is back


def test_depth_is_no_limit() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    back = there_and_back(deep)
    for _ in range(20_000):
        assert len(back) == 1
        back = back[0]
    assert back == []


def test_objects_come_back_without_their_constructor_or_any_code_of_theirs() -> None:
    board = Board(3)
    board.put(1, 1)
    object.__setattr__(board, "closed", True)
    before = Board.made
    back = there_and_back({"b": board, "put": board.put, "make": Board.standard})
    assert Board.made == before
    assert back["b"].cells == board.cells
    assert back["put"].__self__ is back["b"]
    assert back["put"](1, 1) == 2 + 3
    assert back["make"] == Board.standard


def test_slots_subclasses_of_builtins_and_their_attributes_come_back() -> None:
    mixed = MixedSlots()
    stack = samples.Stack([3, 1])
    stack.label = "mine"
    names = Names(a=1)
    back = there_and_back([mixed, stack, names])
    assert (back[0].a, back[0].b, back[0].extra) == (1, [], "x")
    assert type(back[1]) is samples.Stack
    assert (list(back[1]), back[1].label) == ([3, 1], "mine")
    assert type(back[2]) is Names
    assert dict.__eq__(back[2], names)


def test_models_come_back_with_private_and_extra_fields_and_no_validation() -> None:
    message = Message.model_construct(role="user", content=[1], other="o")
    message.__dict__["role"] = "forbidden"
    message.__pydantic_private__ = {"_seen": 4}
    back = there_and_back(message)
    assert back.__dict__ == message.__dict__
    assert back.__pydantic_extra__ == {"other": "o"}
    assert back._seen == 4
    assert back.model_fields_set == message.model_fields_set


def test_random_generators_go_on_where_they_were() -> None:
    ours = random.Random(3)
    ours.gauss(0, 1)
    generators: list[Any] = [np.random.default_rng(1), np.random.RandomState(2)]
    generators += [np.random.Generator(getattr(np.random, n)(7)) for n in ("MT19937", "Philox", "SFC64", "PCG64DXSM")]
    for generator in generators:
        generator.standard_normal(3)
    back, *others = there_and_back([ours, *generators])
    assert [back.gauss(0, 1) for _ in range(5)] == [ours.gauss(0, 1) for _ in range(5)]
    for one, other in zip(generators, others, strict=True):
        assert (one.standard_normal(9) == other.standard_normal(9)).all()
    assert (generators[0].spawn(1)[0].random(4) == others[0].spawn(1)[0].random(4)).all()


def test_a_bit_generator_that_two_generators_share_stays_shared() -> None:
    source = np.random.PCG64(1)
    one, two = there_and_back([np.random.Generator(source), np.random.Generator(source)])
    expected = np.random.default_rng(1)
    assert [one.random(), two.random()] == [expected.random(), expected.random()]


def test_counters_partials_and_locks_come_back() -> None:
    count = itertools.count(5, 2)
    next(count)
    part = functools.partial(samples.double, x=[4])
    lock, event, semaphore = threading.Lock(), asyncio.Event(), asyncio.Semaphore(3)
    event.set()
    back = there_and_back([count, part, lock, event, semaphore])
    assert next(back[0]) == 7
    assert back[1].func is samples.double
    assert back[1].keywords == {"x": [4]}
    assert back[2].acquire(blocking=False)
    assert back[3].is_set()
    assert back[4]._value == 3


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1, "a", None, [2]], dtype=object),
        np.array(3),
        np.zeros((0, 4)),
        np.arange(10)[::2],
        np.array(["a", "bcd"]),
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.zeros(2, dtype=[("a", "<i4", (2, 2)), ("n", [("x", "u1")])]),
        np.array(["2026-01-01"], dtype="M8[ns]"),
        np.array([np.nan, -0.0], dtype=">f4"),
        np.zeros((100, 100), dtype=bool),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_come_back_with_dtype_shape_order_and_bytes(array: Any) -> None:
    back = there_and_back(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.flags.writeable
    assert back.flags.f_contiguous == array.flags.f_contiguous or not array.flags.c_contiguous
    if array.dtype == object:
        assert back.tolist() == array.tolist()
    else:
        assert back.tobytes() == array.tobytes()


def test_a_read_only_array_stays_read_only() -> None:
    array = np.arange(3)
    array.setflags(write=False)
    assert not there_and_back(array).flags.writeable


def frame() -> pd.DataFrame:
    made = pd.DataFrame(
        {
            "text": ["x", None, "é"],
            "int": [1, 2, 3],
            "float": [1.5, math.nan, -0.0],
            "mixed": pd.Series(["a", 3, None], dtype=object),
            "cat": pd.Categorical(["q", "r", None], categories=["r", "q"], ordered=True),
            "when": pd.to_datetime(["2026-01-01", None, "2027-01-01"]),
            "zone": pd.to_datetime(["2026-01-01", None, "2027-01-01"]).tz_localize("Europe/Berlin"),
            "masked": pd.array([1, None, 3], dtype="Int16"),
            "flag": pd.array([True, None, False], dtype="boolean"),
            "nullable": pd.array(["u", None, "w"], dtype=pd.StringDtype("python", na_value=pd.NA)),
            "delta": pd.to_timedelta(["1s", None, "2s"]),
        },
        index=pd.Index(["i", "j", "k"], name="key"),
    )
    made.attrs["source"] = {"a": 1}
    return made


def test_frames_come_back_with_their_exact_dtypes() -> None:
    made = frame()
    back = there_and_back(made)
    pd.testing.assert_frame_equal(back, made, check_exact=True, check_freq=True)
    assert back.dtypes.tolist() == made.dtypes.tolist()
    assert back.index.dtype == made.index.dtype
    assert back.attrs == made.attrs
    assert [type(v) for v in back["mixed"]] == [type(v) for v in made["mixed"]]


def test_a_frame_behaves_the_same_after_it_came_back() -> None:
    made = frame()
    back = there_and_back(made)
    for table in (made, back):
        table.loc["n"] = table.loc["i"]
    pd.testing.assert_frame_equal(
        pd.concat([back, back], ignore_index=True), pd.concat([made, made], ignore_index=True)
    )
    assert repr(made[made["text"] == "x"].to_dict("records")) == repr(back[back["text"] == "x"].to_dict("records"))


@pytest.mark.parametrize(
    "index",
    [
        pd.RangeIndex(2, 9, 3, name="r"),
        pd.DatetimeIndex(["2026-01-01", "2026-01-02", "2026-01-03"], freq="D"),
        pd.date_range("2026-01-01", periods=3, freq="h", tz="UTC"),
        pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["x", "y"]),
        pd.CategoricalIndex(["a", "b"]),
        pd.timedelta_range("1s", periods=3),
        pd.Index([1.5, 2.5]),
    ],
    ids=lambda i: type(i).__name__ + str(i.dtype),
)
def test_indexes_come_back(index: Any) -> None:
    back = there_and_back(pd.Series(range(len(index)), index=index)).index
    pd.testing.assert_index_equal(back, index, exact=True)
    assert getattr(back, "freq", None) == getattr(index, "freq", None)


def test_columns_of_one_name_stay_apart() -> None:
    made = pd.DataFrame([[1, "a"], [2, "b"]], columns=["n", "n"])
    pd.testing.assert_frame_equal(there_and_back(made), made)


class Local:
    """Not in a module of the scope."""


def _generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: open(__file__), "_io.TextIOWrapper"),  # noqa: SIM115
        (lambda: subprocess.Popen([sys.executable, "-c", ""]), "subprocess.Popen"),
        (lambda: lambda: 0, "lambda"),
        (lambda: defaultdict(lambda: 0), "lambda"),
        (threading.Thread, "threading.Thread"),
        (_generator, "generator"),
        (Local, "not a class of the server"),
        (samples.Owner, "__del__"),
        (lambda: re, "module"),
        (lambda: memoryview(b""), "memoryview"),
        (lambda: pd.Series(pd.period_range("2026", periods=2, freq="M")), "period"),
        (lambda: iter([]), "list_iterator"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path(make: Any, what: str) -> None:
    thing = make()
    try:
        with pytest.raises(codec.Unencodable, match=re.escape("session['a'][1]")) as caught:
            codec.encode({"a": [0, thing]}, SCOPE)
        assert what in str(caught.value)
    finally:
        for end in ("wait", "close"):
            if hasattr(thing, end):
                getattr(thing, end)()


def test_a_lock_that_is_held_is_refused() -> None:
    lock = threading.Lock()
    with lock, pytest.raises(codec.Unencodable, match="is held"):
        codec.encode({"lock": lock}, SCOPE)


def test_arrays_that_share_memory_are_refused_rather_than_separated() -> None:
    base = np.arange(9)
    with pytest.raises(codec.Unencodable, match="shares its memory"):
        codec.encode([base, base[2:5]], SCOPE)
    codec.encode([base[:4], base[4:]], SCOPE)


def test_a_class_made_inside_a_function_is_refused() -> None:
    class Inner(Board):
        pass

    Inner.__module__ = "tests.state.samples"
    with pytest.raises(codec.Unencodable, match="found again by name"):
        codec.encode(Inner(1), SCOPE)


def test_a_class_that_derives_from_one_of_unknown_origin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = type("Worker", (threading.Thread,), {"__module__": "tests.state.samples", "__qualname__": "Worker"})
    monkeypatch.setattr(samples, "Worker", worker, raising=False)
    with pytest.raises(codec.Unencodable, match=r"derives from threading\.Thread"):
        codec.encode(worker(), SCOPE)
