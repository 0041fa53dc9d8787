"""pandas: frames, series, indexes and scalars, with their exact dtypes.

The one rule: every column comes back with the dtype it had; a dtype that is not listed here is Unencodable and never
converted. pandas is never imported to encode; to decode it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from participant_shims.gate.state.arrays import pack_array, read_array
from participant_shims.gate.state.graph import Decoder, Encode, Encoder, Entry, Handler, Malformed
from participant_shims.gate.state.shapes import exact_list

_UNITS: Final = ("s", "ms", "us", "ns")
_MASKED: Final = (
    *(f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)),
    "Float32",
    "Float64",
    "boolean",
)


def _pd() -> Any:
    return importlib.import_module("pandas")


def _np() -> Any:
    return importlib.import_module("numpy")


def loaded() -> bool:
    """Whether the server has pandas loaded."""
    return "pandas" in sys.modules


def _column(encoder: Encoder, values: Any, number: int) -> list[Any]:
    """One-dimensional values with their dtype, `values` being what `.array` gives."""
    pd, np = _pd(), _np()
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        categories = encoder.attribute(values.categories, number, "categories")
        return ["c", bool(values.ordered), pack_array(encoder, values.codes, number), categories]
    if isinstance(dtype, pd.StringDtype):
        missing = "NA" if dtype.na_value is pd.NA else "nan"
        texts = values.to_numpy(dtype=object, na_value=None).tolist()
        return ["s", dtype.storage, missing, encoder.items(texts, number)]
    if isinstance(dtype, pd.DatetimeTZDtype):
        zone = encoder.attribute(dtype.tz, number, "tz")
        return ["z", dtype.unit, zone, pack_array(encoder, values.asi8, number)]
    if str(dtype) in _MASKED and hasattr(values, "_mask"):
        return [
            "m",
            str(dtype),
            pack_array(encoder, values._data, number),
            pack_array(encoder, values._mask, number),
        ]
    if not isinstance(dtype, np.dtype) and not isinstance(getattr(dtype, "numpy_dtype", None), np.dtype):
        raise encoder.refuse(number, values, f"dtype {dtype}")
    plain = np.asarray(values)
    if plain.dtype == np.dtype(object):
        return ["o", encoder.items(plain.tolist(), number)]
    return ["n", pack_array(encoder, plain, number)]


def _read_column(decoder: Decoder, packed: Any) -> Any:
    pd, np = _pd(), _np()
    if not exact_list(packed) or not packed:
        raise Malformed("bad column")
    kind: Any = packed[0]
    parts = packed[1:]
    if kind == "n":
        return read_array(decoder, parts[0])
    if kind == "o":
        items = decoder.all(parts[0])
        made = np.empty(len(items), dtype=object)
        for index, item in enumerate(items):
            made[index] = item
        return made
    if kind == "s":
        if parts[0] not in ("python", "pyarrow") or parts[1] not in ("NA", "nan"):
            raise Malformed("bad text column")
        dtype = pd.StringDtype(parts[0], na_value=pd.NA if parts[1] == "NA" else np.nan)
        return pd.array(decoder.all(parts[2]), dtype=dtype)
    if kind == "c":
        return pd.Categorical.from_codes(
            read_array(decoder, parts[1]), categories=decoder.get(parts[2]), ordered=parts[0] is True
        )
    if kind == "z":
        if parts[0] not in _UNITS:
            raise Malformed("bad unit")
        instants = read_array(decoder, parts[2]).view(f"M8[{parts[0]}]")
        return pd.DatetimeIndex(instants).tz_localize("UTC").tz_convert(decoder.get(parts[1])).array
    if kind == "m":
        if parts[0] not in _MASKED:
            raise Malformed("bad dtype")
        cls = pd.array([], dtype=parts[0]).__class__
        return cls(read_array(decoder, parts[1]), read_array(decoder, parts[2]))
    raise Malformed("unknown kind of column")


def _index(encoder: Encoder, obj: Any, number: int) -> Entry:
    pd = _pd()
    name = encoder.attribute(obj.name, number, "name")
    if type(obj) is pd.RangeIndex:
        return ["pr", name, [int(obj.start), int(obj.stop), int(obj.step)]]
    freq = getattr(obj, "freqstr", None) if type(obj) in (pd.DatetimeIndex, pd.TimedeltaIndex) else None
    return ["pi", name, freq, _column(encoder, obj.array, number)]


def _read_index(decoder: Decoder, entry: Entry) -> Any:
    pd = _pd()
    values = _read_column(decoder, entry[3])
    made = pd.Index(values, dtype=values.dtype, name=decoder.get(entry[1]))
    if entry[2] is not None:
        made = type(made)(made, freq=entry[2], name=decoder.get(entry[1]))
    return made


def _read_range(decoder: Decoder, entry: Entry) -> Any:
    bounds = entry[2]
    if not exact_list(bounds) or not all(type(n) is int for n in bounds):
        raise Malformed("bad range")
    return _pd().RangeIndex(*bounds, name=decoder.get(entry[1]))


def _multi_index(encoder: Encoder, obj: Any, number: int) -> Entry:
    return [
        "pm2",
        encoder.items(list(obj.names), number),
        encoder.items(list(obj.levels), number),
        [pack_array(encoder, codes, number) for codes in map(_np().asarray, obj.codes)],
    ]


def _read_multi_index(decoder: Decoder, entry: Entry) -> Any:
    codes = [read_array(decoder, packed) for packed in entry[3]]
    return _pd().MultiIndex(levels=decoder.all(entry[2]), codes=codes, names=decoder.all(entry[1]))


def _flags(encoder: Encoder, obj: Any, number: int) -> None:
    if not obj.flags.allows_duplicate_labels:
        raise encoder.refuse(number, obj, "forbids duplicate labels")


def _series(encoder: Encoder, obj: Any, number: int) -> Entry:
    _flags(encoder, obj, number)
    return [
        "ps",
        encoder.attribute(obj.name, number, "name"),
        encoder.attribute(obj.index, number, "index"),
        encoder.named({str(k): v for k, v in obj.attrs.items()}, number),
        _column(encoder, obj.array, number),
    ]


def _make_series(values: Any, index: Any, name: Any) -> Any:
    # The dtype is given, since pandas would otherwise turn objects that look like text into its text dtype.
    return _pd().Series(values, index=index, dtype=values.dtype, name=name)


def _read_series(decoder: Decoder, entry: Entry) -> Any:
    made = _make_series(_read_column(decoder, entry[4]), decoder.get(entry[2]), decoder.get(entry[1]))
    made.attrs.update(decoder.named(entry[3]))
    return made


def _frame(encoder: Encoder, obj: Any, number: int) -> Entry:
    _flags(encoder, obj, number)
    return [
        "pf",
        encoder.attribute(obj.index, number, "index"),
        encoder.attribute(obj.columns, number, "columns"),
        encoder.named({str(k): v for k, v in obj.attrs.items()}, number),
        [_column(encoder, obj.iloc[:, position].array, number) for position in range(obj.shape[1])],
    ]


def _read_frame(decoder: Decoder, entry: Entry) -> Any:
    pd = _pd()
    index, columns = decoder.get(entry[1]), decoder.get(entry[2])
    if not isinstance(index, pd.Index) or not isinstance(columns, pd.Index) or not exact_list(entry[4]):
        raise Malformed("bad frame")
    series = [_make_series(_read_column(decoder, packed), index, None) for packed in entry[4]]
    # By position, so that columns of one name stay apart.
    made = pd.DataFrame(dict(enumerate(series)), index=index)
    made.columns = columns
    made.attrs.update(decoder.named(entry[3]))
    return made


def _timestamp(encoder: Encoder, obj: Any, number: int) -> Entry:
    count = int(obj.asm8.view("i8"))
    return ["pT", encoder.items([count], number), obj.unit, encoder.attribute(obj.tzinfo, number, "tz")]


def _read_timestamp(decoder: Decoder, entry: Entry) -> Any:
    pd, np = _pd(), _np()
    made = pd.Timestamp(np.datetime64(*_instant(decoder, entry)))
    zone = decoder.get(entry[3])
    return made if zone is None else made.tz_localize("UTC").tz_convert(zone)


def _timedelta(encoder: Encoder, obj: Any, number: int) -> Entry:
    return ["pD", encoder.items([int(obj.asm8.view("i8"))], number), obj.unit]


def _instant(decoder: Decoder, entry: Entry) -> tuple[int, str]:
    counts = decoder.all(entry[1])
    if len(counts) != 1 or type(counts[0]) is not int or entry[2] not in _UNITS:
        raise Malformed("bad instant")
    return counts[0], entry[2]


def exact() -> dict[type, Encode]:
    """The encoders by type; empty while pandas is not loaded."""
    if not loaded():
        return {}
    pd = _pd()
    found: dict[type, Encode] = {
        pd.DataFrame: _frame,
        pd.Series: _series,
        pd.MultiIndex: _multi_index,
        pd.Timestamp: _timestamp,
        pd.Timedelta: _timedelta,
        type(pd.NaT): lambda e, o, n: ["pN"],
        type(pd.NA): lambda e, o, n: ["pA"],
    }
    for name in ("Index", "RangeIndex", "DatetimeIndex", "TimedeltaIndex", "CategoricalIndex"):
        found[getattr(pd, name)] = _index
    return found


HANDLERS: Final[dict[str, Handler]] = {
    "pf": Handler(5, _read_frame, deferred=True),
    "ps": Handler(5, _read_series, deferred=True),
    "pi": Handler(4, _read_index, deferred=True),
    "pr": Handler(3, _read_range, deferred=True),
    "pm2": Handler(4, _read_multi_index, deferred=True),
    "pT": Handler(4, _read_timestamp, deferred=True),
    "pD": Handler(3, lambda d, e: _pd().Timedelta(_np().timedelta64(*_instant(d, e))), deferred=True),
    "pN": Handler(1, lambda d, e: _pd().NaT),
    "pA": Handler(1, lambda d, e: _pd().NA),
}
