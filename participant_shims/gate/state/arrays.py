"""numpy: arrays, scalars, dtypes and random generators, bit for bit.

The one rule: an array comes back with its dtype, shape, order and bytes, or not at all. numpy is never imported to
encode (a server that has not loaded it has no arrays); to decode it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from participant_shims.gate.state.graph import (
    Decoder,
    Encode,
    Encoder,
    Entry,
    Handler,
    Malformed,
    pack_bytes,
)
from participant_shims.gate.state.shapes import a_dict, a_list, a_tuple, exact_dict, exact_list

_BIT_GENERATORS: Final = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def _np() -> Any:
    return importlib.import_module("numpy")


def loaded() -> bool:
    """Whether the server has numpy loaded."""
    return "numpy" in sys.modules


def dtype_text(encoder: Encoder, dtype: Any, number: int) -> Any:
    """The description of a dtype as JSON. Raises Unencodable when it would not bring the dtype back."""
    np = _np()
    described = _listed(np.lib.format.dtype_to_descr(dtype)) if dtype.kind != "T" else None
    if described is None or dtype.metadata or (not dtype.hasobject and read_dtype(described) != dtype):
        raise encoder.refuse(number, dtype, f"dtype {dtype} can't be described")
    return described


def _listed(described: Any) -> Any:
    return [_listed(d) for d in described] if a_list(described) or a_tuple(described) else described


def read_dtype(described: Any) -> Any:
    """The dtype of a description. Raises Malformed when it holds objects."""
    np = _np()
    if type(described) not in (str, list):
        raise Malformed("bad dtype")
    dtype = np.lib.format.descr_to_dtype(_tupled(described, outer=True))
    if dtype.hasobject:
        raise Malformed("a dtype with objects in binary data")
    return dtype


def _tupled(described: Any, *, outer: bool) -> Any:
    # JSON has lists only. A structured dtype is a list of tuples; a sub-array or a shape within it is a tuple.
    if not exact_list(described):
        return described
    if outer and all(exact_list(field) for field in described):
        return [
            tuple(_tupled(part, outer=i == 1 and type(part) is list) for i, part in enumerate(field))
            for field in described
        ]
    return tuple(_tupled(part, outer=i == 0 and type(part) is list) for i, part in enumerate(described))


def pack_array(encoder: Encoder, array: Any, number: int) -> list[Any]:
    """`[dtype, bytes]` of an array without objects, in C order."""
    return [dtype_text(encoder, array.dtype, number), pack_bytes(array.tobytes())]


def read_array(decoder: Decoder, packed: Any) -> Any:
    """The flat, writable array that `pack_array` packed."""
    if not exact_list(packed) or len(packed) != 2:
        raise Malformed("bad array")
    dtype, data = read_dtype(packed[0]), decoder.binary(packed[1])
    if dtype.itemsize == 0 or len(data) % dtype.itemsize:
        raise Malformed("array data does not fit its dtype")
    return _np().frombuffer(data, dtype).copy()


def _array(encoder: Encoder, obj: Any, number: int) -> Entry:
    np = _np()
    if obj.dtype == np.dtype(object):
        return ["no", list(obj.shape), bool(obj.flags.writeable), encoder.items(obj.reshape(-1).tolist(), number)]
    if obj.dtype.hasobject:
        raise encoder.refuse(number, obj, "has a structured dtype with objects")
    if obj.dtype.itemsize == 0:
        raise encoder.refuse(number, obj, "has items of no size")
    bounds = np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils") else np.byte_bounds
    low, high = bounds(obj)
    encoder.buffer(number, obj, low, high - low)
    order = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
    packed = [dtype_text(encoder, obj.dtype, number), pack_bytes(obj.tobytes(order=order))]
    return ["na", list(obj.shape), order, bool(obj.flags.writeable), packed]


def _shape(shape: Any, size: int) -> tuple[int, ...]:
    if not exact_list(shape) or len(shape) > 32 or not all(type(n) is int and 0 <= n <= 1 << 40 for n in shape):
        raise Malformed("bad shape")
    product = 1
    for n in shape:
        product *= n
    if product != size:
        raise Malformed("shape and data differ")
    return tuple(shape)


def _read(decoder: Decoder, entry: Entry) -> Any:
    flat = read_array(decoder, entry[4])
    shape = _shape(entry[1], flat.size)
    if entry[2] not in ("C", "F"):
        raise Malformed("bad order")
    made = flat.reshape(shape, order=entry[2])
    # Its own memory, as the original has: a reshaped view would answer `.base` differently.
    made = made.copy(order=entry[2])
    made.setflags(write=entry[3] is True)
    return made


def _read_objects(decoder: Decoder, entry: Entry) -> Any:
    items = entry[3]
    if not exact_list(items):
        raise Malformed("bad array")
    return _np().empty(_shape(entry[1], len(items)), dtype=object)


def _fill_objects(decoder: Decoder, entry: Entry, obj: Any) -> None:
    flat = obj.reshape(-1)
    for index, value in enumerate(decoder.all(entry[3])):
        flat[index] = value
    obj.setflags(write=entry[2] is True)


def _scalar(encoder: Encoder, obj: Any, number: int) -> Entry:
    array = _np().asarray(obj)
    if array.dtype.hasobject or array.dtype.itemsize == 0:
        # An empty numpy text has no bytes of its own.
        return ["ns0", array.dtype.kind] if array.dtype.kind in "US" else _refuse(encoder, number, obj)
    return ["nv", pack_array(encoder, array, number)]


def _refuse(encoder: Encoder, number: int, obj: Any) -> Entry:
    raise encoder.refuse(number, obj, "holds objects")


def _read_scalar(decoder: Decoder, entry: Entry) -> Any:
    flat = read_array(decoder, entry[1])
    if flat.size != 1:
        raise Malformed("bad scalar")
    return flat[0]


def _read_empty_text(decoder: Decoder, entry: Entry) -> Any:
    np = _np()
    kinds = {"U": np.str_, "S": np.bytes_}
    if type(entry[1]) is not str or entry[1] not in kinds:
        raise Malformed("bad scalar")
    return kinds[entry[1]]()


# -- random generators -------------------------------------------------------------------------------------------------


def _state(encoder: Encoder, value: Any, number: int) -> Any:
    if a_dict(value):
        return {str(k): _state(encoder, v, number) for k, v in value.items()}
    if isinstance(value, str | float):
        return value
    if isinstance(value, int) or _np().ndim(value) == 0:
        return [f"{int(value):x}"]
    return pack_array(encoder, value, number)


def _read_state(decoder: Decoder, state: Any, depth: int = 0) -> Any:
    if depth > 4:
        raise Malformed("bad generator state")
    if exact_dict(state):
        return {str(k): _read_state(decoder, v, depth + 1) for k, v in state.items()}
    if exact_list(state):
        return int(state[0], 16) if len(state) == 1 else read_array(decoder, state)
    if type(state) not in (str, float):
        raise Malformed("bad generator state")
    return state


def _bit_generator(encoder: Encoder, obj: Any, number: int) -> Entry:
    np = _np()
    seeds: Any = getattr(obj, "seed_seq", None) or getattr(obj, "_seed_seq", None)
    origin: Any = None
    if type(seeds) is np.random.SeedSequence:
        entropy: Any = seeds.entropy
        words = [entropy] if isinstance(entropy, int) else [int(w) for w in entropy]
        many = not isinstance(entropy, int)
        key = [int(k) for k in seeds.spawn_key]
        origin = [[f"{w:x}" for w in words], many, key, seeds.pool_size, seeds.n_children_spawned]
    return ["nb", type(obj).__name__, _state(encoder, obj.state, number), origin]


def _read_bit_generator(decoder: Decoder, entry: Entry) -> Any:
    np = _np()
    if entry[1] not in _BIT_GENERATORS:
        raise Malformed("unknown bit generator")
    seed: Any = 0
    if entry[3] is not None:
        words, many, key, pool, children = entry[3]
        numbers = [int(w, 16) for w in words]
        if not numbers or len(numbers) > 1024 or type(pool) is not int or not 4 <= pool <= 1024:
            raise Malformed("bad seed sequence")
        entropy = numbers if many is True else numbers[0]
        seed = np.random.SeedSequence(entropy, spawn_key=key, pool_size=pool, n_children_spawned=children)
    made = getattr(np.random, entry[1])(seed)
    made.state = _read_state(decoder, entry[2])
    return made


def _generator(encoder: Encoder, obj: Any, number: int) -> Entry:
    return ["ng", encoder.attribute(obj.bit_generator, number, "bit_generator")]


def _read_generator(decoder: Decoder, entry: Entry) -> Any:
    np = _np()
    source = decoder.get(entry[1])
    if not isinstance(source, np.random.BitGenerator):
        raise Malformed("bad generator")
    return np.random.Generator(source)


def _random_state(encoder: Encoder, obj: Any, number: int) -> Entry:
    state = obj.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise encoder.refuse(number, obj, "is not of the default kind")
    return ["nr", _state(encoder, state, number)]


def _read_random_state(decoder: Decoder, entry: Entry) -> Any:
    made = _np().random.RandomState(0)
    made.set_state(_read_state(decoder, entry[1]))
    return made


def exact() -> dict[type, Encode]:
    """The encoders by type; empty while numpy is not loaded."""
    if not loaded():
        return {}
    np = _np()
    found: dict[type, Encode] = {
        np.ndarray: _array,
        np.random.Generator: _generator,
        np.random.RandomState: _random_state,
    }
    found.update({getattr(np.random, name): _bit_generator for name in _BIT_GENERATORS})
    for code in np.typecodes["All"]:
        found[np.dtype(code).type] = _scalar
        found[type(np.dtype(code))] = _dtype
    found.pop(np.object_, None)
    return found


def _dtype(encoder: Encoder, obj: Any, number: int) -> Entry:
    if obj.hasobject and obj != _np().dtype(object):
        raise encoder.refuse(number, obj, "has objects")
    return ["nt", "O" if obj.hasobject else dtype_text(encoder, obj, number)]


HANDLERS: Final[dict[str, Handler]] = {
    "na": Handler(5, _read),
    "no": Handler(4, _read_objects, _fill_objects),
    "nv": Handler(2, _read_scalar),
    "ns0": Handler(2, _read_empty_text),
    "nt": Handler(2, lambda d, e: _np().dtype(object) if e[1] == "O" else read_dtype(e[1])),
    "nb": Handler(4, _read_bit_generator),
    "ng": Handler(2, _read_generator, deferred=True),
    "nr": Handler(2, _read_random_state),
}
