"""Python values as bytes, by value: what sidecars and hyper-parameters travel in.

An encoding is one flat msgpack array, the value's tree with parents before children. None, booleans, floats,
integers of up to 64 bits and well-formed text stand for themselves. Bytes are an ext with tag 0. Everything
else is an ext whose tag names the class and whose data counts the parts that follow (32 bits, big endian):

    [1, "a"]    ->  [Ext(10, 2), 1, "a"]
    {"x": 1j}   ->  [Ext(14, 2), "x", Ext(3, 2), 0.0, 1.0]

Flat, because then no nesting and no false count can make the msgpack decoder recurse or allocate: memory is
bounded by the size of the input, and the recursion that rebuilds the tree counts its own depth. Nothing is
unpickled, no class is looked up by a name that was received, and only the functions in `_FORMS` are called.

Equal values have equal encodings: sets are sorted by the encodings of their members, dicts keep their order.
Tensor and array elements are raw bytes, row-major, in the byte order of the host or of the array's dtype.
"""

from __future__ import annotations

import ctypes
import re
import reprlib
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder, Ext

from .errors import ProtocolError, Unsupported

MAX_DEPTH = 64  #: containers within containers, for encoder (where a cycle ends) and decoder alike

_RAW = 0
_ATOMS = frozenset({type(None), bool, float})
_SURROGATE = re.compile("[\ud800-\udfff]")
_UTF8 = ("utf-8", "surrogatepass")
_NUMERIC = re.compile(r"[<>|][biufc]\d{1,2}")
_MALFORMED = (MsgspecError, ArithmeticError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
_encode = Encoder().encode
_decode = Decoder(list[bool | int | float | str | Ext | None]).decode


class UnsupportedValue(Unsupported, TypeError):
    """A value without an encoding: `path` says where it lies, `kind` is its class, `why` the obstacle."""

    def __init__(self, path: str, kind: type, why: str = "which has no encoding by value") -> None:
        super().__init__(path, kind, why)
        self.path, self.kind, self.why = path, kind, why

    def __str__(self) -> str:
        return (
            f"{self.path} is a {self.kind.__module__}.{self.kind.__qualname__}, {self.why}; return plain"
            " values (numbers, text, lists, dicts, dense tensors, numeric arrays) from state_dict()"
        )


class BadValue(ProtocolError, ValueError):
    """Bytes that are no encoding: truncated, altered, or not made by `dumps`."""


def dumps(obj: object, *, name: str = "state") -> bytes:
    """Encode `obj` by value; errors call it `name`.

    Takes exactly these classes, nested up to `MAX_DEPTH`: None, bool, int, float, complex, str, bytes,
    bytearray, list, tuple, set, frozenset, dict, OrderedDict, Counter, deque; torch's dtype, device, Size,
    Tensor and Parameter (dense, any dtype and device; an accelerator is waited for); numpy's arrays and
    scalars (bool, integer, floating, complex). Raises `UnsupportedValue` for others, also their subclasses.
    """
    items: list[Any] = []
    try:
        _put(items, obj, 0)
    except UnsupportedValue as error:
        raise UnsupportedValue(name + error.path, error.kind, error.why) from None
    return _encode(items)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value that `dumps` encoded: same classes, floats equal to the bit, no memory shared with `data`.

    A tensor comes back on the CPU, without requires_grad (a Parameter as a Tensor), and row-major, as arrays
    do. An object referenced twice comes back as two. Raises `BadValue` for bytes that `dumps` did not make.
    """
    try:
        items = iter(_decode(data))
        value = _take(items, 0)
        if next(items, items) is not items:
            raise ValueError("something follows its end")
        return value
    except StopIteration:
        raise BadValue("not an encoded value: a container has fewer parts than it claims") from None
    except _MALFORMED as error:
        raise BadValue(f"not an encoded value: {str(error)[:200]}") from None


def _put(items: list[Any], obj: Any, depth: int) -> None:
    kind = type(obj)
    if (
        kind in _ATOMS
        or (kind is str and (obj.isascii() or not _SURROGATE.search(obj)))
        or (kind is int and -(1 << 63) <= obj < 1 << 64)
    ):
        items.append(obj)
        return
    if kind is bytes:
        items.append(Ext(_RAW, obj))
        return
    if depth == MAX_DEPTH:
        raise UnsupportedValue("", kind, f"nested more than {MAX_DEPTH} deep, or within itself")
    form = _FORM_OF.get(kind) or _find_form(kind)
    parts = form.split(obj)
    items.append(Ext(form.tag, len(parts).to_bytes(4, "big")))
    index = 0
    try:
        if kind is set or kind is frozenset:
            items.extend(_sorted_members(parts, depth + 1))
        elif len(parts) >= 16 and _are_small_ints(parts):  # 625 of them are the state of `random`
            items.extend(parts)
        else:
            while index < len(parts):
                _put(items, parts[index], depth + 1)
                index += 1
    except UnsupportedValue as error:
        raise UnsupportedValue(_step(obj, index) + error.path, error.kind, error.why) from None


def _sorted_members(members: Any, depth: int) -> Iterator[Any]:
    encoded: list[list[Any]] = []
    for member in members:
        encoded.append([])
        _put(encoded[-1], member, depth)
    return chain.from_iterable(sorted(encoded, key=_encode))


def _are_small_ints(parts: Any) -> bool:
    return set(map(type, parts)) == {int} and min(parts) >= -(1 << 63) and max(parts) < 1 << 64


def _step(obj: object, index: int) -> str:
    """The way from `obj` to its part `index`, as Python would write it."""
    if isinstance(obj, set | frozenset):
        return "{...}"
    if not isinstance(obj, dict):
        return f"[{index}]"
    if index == 2 * len(obj):
        return ".__dict__"
    return f"[{reprlib.repr(list(obj)[index // 2])}]" if index % 2 else f".keys()[{index // 2}]"


def _take(items: Iterator[Any], depth: int) -> Any:
    item = next(items)
    if type(item) is not Ext:
        return item
    if item.code == _RAW:
        return item.data
    build = _BUILD_OF.get(item.code)
    if build is None or depth == MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep" if build else f"unknown tag {item.code}")
    return build([_take(items, depth + 1) for _ in range(int.from_bytes(item.data, "big"))])


# ---------------------------------------------------------------- what a value is split into, and built from


def _only(parts: list[Any], kind: type) -> Any:
    (part,) = parts
    if type(part) is not kind:  # constructors take more than we give: bytearray(10**12) is a terabyte
        raise ValueError(f"{type(part).__name__} where {kind.__name__} belongs")
    return part


def _pairs(mapping: dict[Any, Any]) -> list[Any]:
    return [part for pair in mapping.items() for part in pair]


def _dict(parts: list[Any]) -> dict[Any, Any]:
    made = dict(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(made) != len(parts):
        raise ValueError("a dict holds a key twice")
    return made


def _mapping(kind: Callable[[dict[Any, Any]], Any], parts: list[Any]) -> Any:
    made = kind(_dict(parts[:-1]))
    vars(made).update(**_only(parts[-1:], dict))
    return made


def _set(kind: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    made = kind(parts)
    if len(made) != len(parts):
        raise ValueError("a set holds a member twice")
    return made


def _shape(sizes: Any) -> tuple[int, ...]:
    if type(sizes) is not tuple or not all(type(n) is int and not n >> 63 for n in sizes):
        raise ValueError("a shape that is none")
    return sizes


def _split_tensor(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise UnsupportedValue("", type(tensor), "but not a dense one with data of its own")
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""  # needs no numpy
    except RuntimeError as error:
        raise UnsupportedValue("", type(tensor), f"which torch cannot copy ({error})") from None
    return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data


def _torch() -> Any:
    import torch

    return torch


def _dtype(parts: list[Any]) -> Any:
    dtype = vars(_torch()).get(_only(parts, str))  # not getattr, which may import what it is asked for
    if not isinstance(dtype, _torch().dtype):
        raise ValueError("a dtype that this torch does not have")
    return dtype


def _tensor(parts: list[Any]) -> Any:
    torch = _torch()
    name, shape, data = parts
    dtype, data = _dtype([name]), _only([data], bytes)
    if name.startswith("q"):  # reading one that has no scale would crash
        raise ValueError("a quantized tensor")
    # Into torch's own memory, which is aligned for its vector loops as a bytearray is not.
    flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    if data:
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return flat.view(dtype).reshape(_shape(shape))


def _split_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if array.dtype.kind not in "biufc":
        raise UnsupportedValue("", type(array), f"but its dtype {array.dtype} is not numeric")
    return array.dtype.str, array.shape, array.tobytes()


def _array(parts: list[Any]) -> Any:
    import numpy

    name, shape, data = parts
    if not _NUMERIC.fullmatch(_only([name], str)) or numpy.dtype(name).str != name:
        raise ValueError("a dtype that is not numeric")
    return numpy.frombuffer(bytearray(_only([data], bytes)), name).reshape(_shape(shape))


class _Form(NamedTuple):
    tag: int
    split: Callable[[Any], Any]  # value -> its parts, a sequence (a set as it is)
    build: Callable[[list[Any]], Any]  # the inverse; trusts neither the number nor the classes of the parts


# By the full name of the class, so that torch and numpy need not be imported. The tags are the format: none
# is ever given a second meaning. A module's state_dict(), an OrderedDict, has versions in an attribute.
_FORMS = {
    "builtins.str": _Form(1, lambda s: [s.encode(*_UTF8)], lambda p: _only(p, bytes).decode(*_UTF8)),
    "builtins.int": _Form(
        2,
        lambda n: [n.to_bytes(n.bit_length() // 8 + 1, "big", signed=True)],
        lambda p: int.from_bytes(_only(p, bytes), "big", signed=True),
    ),
    "builtins.complex": _Form(3, lambda z: (z.real, z.imag), lambda p: complex(*(_only([x], float) for x in p))),
    "builtins.bytearray": _Form(4, lambda raw: [bytes(raw)], lambda p: bytearray(_only(p, bytes))),
    "builtins.list": _Form(10, lambda p: p, list),
    "builtins.tuple": _Form(11, lambda p: p, tuple),
    "builtins.set": _Form(12, lambda p: p, partial(_set, set)),
    "builtins.frozenset": _Form(13, lambda p: p, partial(_set, frozenset)),
    "builtins.dict": _Form(14, _pairs, _dict),
    "collections.OrderedDict": _Form(15, lambda d: [*_pairs(d), vars(d)], partial(_mapping, OrderedDict)),
    "collections.Counter": _Form(16, lambda d: [*_pairs(d), vars(d)], partial(_mapping, Counter)),
    "collections.deque": _Form(17, lambda q: [*q, q.maxlen], lambda p: deque(p[:-1], p[-1])),
    "torch.dtype": _Form(20, lambda d: [str(d).removeprefix("torch.")], _dtype),
    "torch.device": _Form(21, lambda d: [str(d)], lambda p: _torch().device(_only(p, str)[:64])),
    "torch.Size": _Form(22, tuple, lambda p: _torch().Size(_shape(tuple(p)))),
    "torch.Tensor": _Form(23, _split_tensor, _tensor),
    "torch.nn.parameter.Parameter": _Form(23, _split_tensor, _tensor),
    "numpy.ndarray": _Form(30, _split_array, _array),
    "numpy.generic": _Form(31, lambda n: _split_array(n)[::2], lambda p: _array([p[0], (), *p[1:]])[()]),
}
_BUILD_OF = {form.tag: form.build for form in _FORMS.values()}
_FORM_OF: dict[type, _Form] = {}  # filled as classes are met


def _find_form(kind: type) -> _Form:
    home: Any = sys.modules.get(kind.__module__)
    listed = home.generic if kind.__module__ == "numpy" and issubclass(kind, home.generic) else kind
    form = _FORMS.get(f"{listed.__module__}.{listed.__qualname__}")
    if form is None or getattr(home, listed.__name__, None) is not listed:  # not merely of the same name
        raise UnsupportedValue("", kind)
    return _FORM_OF.setdefault(kind, form)
