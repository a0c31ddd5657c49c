"""`checkmate.values`: what goes in comes out, to the class and the bit; all else raises."""

from __future__ import annotations

import collections
import enum
import math
import random
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec.msgpack import Ext, decode, encode
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler

from checkmate import errors
from checkmate.values import _FORMS, MAX_DEPTH, BadValue, UnsupportedValue, dumps, loads

TORCH_DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")},
    key=str,
)
NUMPY_DTYPES = [f"{order}{code}" for code in ("i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16") for order in "<>"]
NUMPY_DTYPES += ["|b1", "|i1", "|u1", np.dtype(np.longdouble).str]


# ---------------------------------------------------------------- equality that sees classes, order and bits


def tensor_bytes(t: torch.Tensor) -> list[int]:
    flat = t.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def strict_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return strict_equal((a.real, a.imag), (b.real, b.imag)) if type(a) is complex else a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and tensor_bytes(a) == tensor_bytes(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(strict_equal(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        same = strict_equal(list(a.keys()), list(b.keys())) and strict_equal(list(a.values()), list(b.values()))
        return same and (type(a) is dict or strict_equal(vars(a), vars(b)))
    if isinstance(a, list | tuple | collections.deque):
        same = len(a) == len(b) and all(map(strict_equal, a, b))
        return same and (not isinstance(a, collections.deque) or a.maxlen == b.maxlen)
    return bool(a == b)


def assert_round_trip(value: Any) -> None:
    data = dumps(value)
    back = loads(data)
    assert strict_equal(value, back), (value, back)
    assert dumps(back) == data


def float_of_bits(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]  # type: ignore[no-any-return]


LOOKALIKES = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (float("nan"), float_of_bits(0x7FF8000000000001)),
    (1.0, np.float64(1.0)),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    ((1,), [1]),
    ((2, 3), torch.Size((2, 3))),
    (b"a", bytearray(b"a")),
    (b"a", "a"),
    ({1}, frozenset({1})),
    ({1}, {1.0}),
    ({1: 2, 3: 4}, {3: 4, 1: 2}),
    ({1: 2}, {True: 2}),
    ({}, collections.OrderedDict()),
    (collections.deque([1]), collections.deque([1], 1)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2), -torch.zeros(2)),
    (torch.zeros(2), torch.zeros(1, 2)),
    (torch.zeros(1), torch.zeros(())),
    (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
    (np.int32(1), np.int64(1)),
    (tuple(range(20)), [*range(19), 19.0]),
]


@pytest.mark.parametrize(("a", "b"), LOOKALIKES, ids=str)
def test_lookalikes_are_told_apart(a: Any, b: Any) -> None:
    """The negative control of every round trip here: neither the helper nor the encoding confuses these."""
    assert strict_equal(a, a)
    assert strict_equal(b, b)
    assert not strict_equal(a, b)
    assert dumps(a) != dumps(b)
    assert_round_trip([a, b])


# ---------------------------------------------------------------- round trips

floats = st.integers(0, 2**64 - 1).map(float_of_bits) | st.floats()
any_text = st.text(st.characters(), max_size=20)  # lone surrogates among them
hashable_atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**127, -(2**5000)]),
    floats,
    st.builds(complex, floats, floats),
    any_text,
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2, torch.device("cpu"), torch.device("cuda:1")]),
    st.lists(st.integers(0, 9), max_size=4).map(torch.Size),
)
hashables = st.recursive(
    hashable_atoms,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=8,
)
arrays = npst.arrays(st.sampled_from(NUMPY_DTYPES[:-1]), npst.array_shapes(min_dims=0, max_side=4, min_side=0))
atoms = st.one_of(
    hashables,
    st.binary(max_size=20).map(bytearray),
    arrays,
    arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0]),
    arrays.map(lambda a: torch.from_numpy(a.astype(a.dtype.newbyteorder("=")))),
    st.lists(st.integers(-(2**64), 2**65), min_size=14, max_size=18).map(tuple),
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(hashables, inner, max_size=5),
        st.dictionaries(hashables, inner, max_size=5).map(collections.OrderedDict),
        st.dictionaries(hashables, inner, max_size=5).map(collections.Counter),
        st.sets(hashables, max_size=5),
        st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 9)),
    ),
    max_leaves=20,
)


@given(values)
@settings(deadline=None, max_examples=300)
def test_any_value_comes_back_to_the_class_and_the_bit(value: Any) -> None:
    assert_round_trip(value)


@given(st.lists(hashables, max_size=8, unique=True), st.randoms())
@settings(deadline=None)
def test_equal_sets_have_equal_bytes(members: list[Any], rng: random.Random) -> None:
    shuffled = rng.sample(members, len(members))
    assert dumps(set(members)) == dumps(set(shuffled))
    assert dumps([frozenset(members)]) == dumps([frozenset(shuffled)])


def test_sets_within_sets_take_no_exponential_time() -> None:
    value: frozenset[Any] = frozenset()
    for _ in range(MAX_DEPTH - 1):
        value = frozenset({value})
    assert_round_trip(value)


def test_encoding_is_what_the_module_says() -> None:
    assert decode(dumps(7)) == [7]
    assert dumps([1, "a"]) == encode([Ext(10, b"\0\0\0\2"), 1, "a"])
    assert dumps({"x": 1j}) == encode([Ext(14, b"\0\0\0\2"), "x", Ext(3, b"\0\0\0\2"), 0.0, 1.0])
    assert dumps(b"ab") == encode([Ext(0, b"ab")])
    assert dumps({3, 1, 2}) == encode([Ext(12, b"\0\0\0\3"), 1, 2, 3])
    assert dumps(torch.tensor([[1, 2]], dtype=torch.int16)) == encode(
        [Ext(23, b"\0\0\0\3"), "int16", Ext(11, b"\0\0\0\2"), 1, 2, Ext(0, b"\1\0\2\0")]
    )


def test_no_tag_has_two_meanings() -> None:
    tags = [form.tag for name, form in _FORMS.items() if name != "torch.nn.parameter.Parameter"]
    assert len(tags) == len(set(tags))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(6 * size, dtype=torch.uint8) + 250
    if dtype == torch.bool:
        raw %= 2
    whole = raw.view(dtype).reshape(2, 3)
    assert_round_trip([dtype, whole, whole[1:], whole[0, 0], whole[:, :0], torch.empty(0, 2**40, dtype=dtype)])
    try:
        transposed = whole.t().contiguous()
    except NotImplementedError:  # torch itself cannot lay it out anew
        with pytest.raises(UnsupportedValue, match="torch cannot copy"):
            dumps(whole.t())
    else:
        assert strict_equal(loads(dumps(whole.t())), transposed)


def test_views_conjugates_and_parameters_come_back_as_plain_tensors() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    imaginary = torch.complex(base, base + 1).conj()
    for tensor in (base.t(), base[:, ::2], base[1].expand(3, 4), imaginary, imaginary.imag):
        back = loads(dumps(tensor))
        assert strict_equal(back, tensor)
        assert back.is_contiguous()
    parameter = torch.nn.Parameter(base)
    for tensor in (parameter, parameter * 2):
        back = loads(dumps(tensor))
        assert not back.requires_grad
        assert strict_equal(back, tensor.detach().clone())


def test_decoded_tensors_and_arrays_are_writable_aligned_copies_on_the_cpu() -> None:
    data = dumps([torch.ones(5), np.ones(5), bytearray(5)])
    with torch.device("meta"):  # as a user who builds a model without memory might have it
        tensor, array, raw = loads(memoryview(data))
    assert tensor.device.type == "cpu"
    assert tensor.data_ptr() % 64 == 0
    tensor.zero_()
    tensor.resize_(7)
    array[:] = 0
    raw[:] = b"xxxxx"
    assert strict_equal(loads(data), [torch.ones(5), np.ones(5), bytearray(5)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_tensors_come_back_on_the_cpu() -> None:
    assert strict_equal(loads(dumps(torch.arange(3.0, device="cuda"))), torch.arange(3.0))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_arrays_and_scalars_of_every_dtype_and_byte_order(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    assert_round_trip([array, array[0, 0], array[:0], array.reshape(-1)[3].reshape(())])
    for view in (np.asfortranarray(array), array[:, ::-1]):
        assert strict_equal(loads(dumps(view)), np.ascontiguousarray(view))


def test_int_runs_of_every_kind() -> None:
    for run in (
        [1] * 20,
        [2**64 - 1, -(2**63)] * 10,
        [2**64] * 20,
        [*range(20), True],
        [0.5] * 20,
        set(range(40)),
    ):
        assert_round_trip(run)
        assert_round_trip(tuple(run))


# ---------------------------------------------------------------- what real programs keep


def test_generator_states_continue_the_same_sequences() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)  # leaves a float in the state
    np.random.standard_normal()
    generators = [np.random.Generator(kind(3)) for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)]
    for generator in generators:
        generator.integers(9, dtype=np.uint32)  # leaves half a word in the state
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "generators": [generator.bit_generator.state for generator in generators],
    }
    assert_round_trip(state)

    def draw() -> list[Any]:
        drawn = [random.gauss(0, 1), random.random(), np.random.standard_normal(), float(torch.rand(()))]
        return drawn + [generator.random() for generator in generators]

    back = loads(dumps(state))
    first = draw()
    assert draw() != first
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    for generator, saved in zip(generators, back["generators"], strict=True):
        generator.bit_generator.state = saved
    assert draw() == first


class Warmup:
    def __init__(self) -> None:
        self.steps = 3

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_the_list_of_schedulers_is_whole() -> None:
    assert set(lr_scheduler.__all__) - set(SCHEDULERS) == {"LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_state(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(4):
        optimizer.step()
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        assert_round_trip(scheduler.state_dict())


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(name: str) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = getattr(torch.optim, name)([parameter], lr=torch.tensor(0.1) if name == "AdamW" else 0.1)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        if name == "SparseAdam":
            parameter.grad = parameter.grad.to_sparse()
        optimizer.step(lambda: torch.tensor(1.0)) if name == "LBFGS" else optimizer.step()
    assert_round_trip(optimizer.state_dict())


def test_a_module_s_state_with_its_versions() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert state._metadata[""] == {"version": 2}
    assert_round_trip(state)
    assert loads(dumps(state))._metadata == state._metadata


def test_scaler_and_sampler_state() -> None:
    sampler = DistributedSampler(range(10), num_replicas=3, rank=1, seed=2)  # type: ignore[arg-type, var-annotated]
    assert_round_trip(torch.amp.GradScaler("cpu").state_dict())
    assert_round_trip({"epoch": sampler.epoch, "seed": sampler.seed, "indices": list(sampler), "taken": (4, 2)})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_dataloader_continues_with_the_same_batches(num_workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        shuffle = torch.Generator().manual_seed(1)
        return torchdata.StatefulDataLoader(
            list(range(24)), batch_size=2, shuffle=True, num_workers=num_workers, generator=shuffle
        )

    first, second = loader(), loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    assert_round_trip(state)
    second.load_state_dict(loads(dumps(state)))
    expected, actual = [b.tolist() for b in batches], [b.tolist() for b in second]
    assert len(expected) == 9
    assert actual == expected


# ---------------------------------------------------------------- what is refused


class Colour(enum.IntEnum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")):
    pass


REFUSED: list[tuple[Any, str]] = [
    (object(), "builtins.object"),
    (random.Random(), "random.Random"),
    (Colour.RED, "Colour"),
    (Point(1, 2), "Point"),
    (collections.defaultdict(int), "collections.defaultdict"),
    (len, "builtins.builtin_function_or_method"),
    (Warmup().__call__, "builtins.method"),
    (list, "builtins.type"),
    (type("list", (list,), {"__module__": "builtins"})(), "builtins.list"),
    (range(3), "builtins.range"),
    (memoryview(b"a"), "builtins.memoryview"),
    (torch.Generator(), "torch._C.Generator"),
    (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    (torch.zeros(3).to_sparse(), "not a dense one"),
    (torch.zeros(3, device="meta"), "not a dense one"),
    (np.array([None]), "dtype object is not numeric"),
    (np.array(["a"]), "is not numeric"),
    (np.zeros(2, "i4,f4"), "is not numeric"),
    (np.str_("a"), "is not numeric"),
    (np.ma.masked_array([1]), "MaskedArray"),
]


@pytest.mark.parametrize(("value", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_unsupported_values_are_refused_with_their_path_and_class(value: Any, said: str) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        dumps({"rng": (1, [value]), "ok": 1})
    assert caught.value.path == "state['rng'][1][0]"
    assert caught.value.kind is type(value)
    assert said in str(caught.value)
    assert "state['rng'][1][0] is a " in str(caught.value)
    assert "return plain values" in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, errors.CheckmateError)


def test_paths_read_as_python() -> None:
    ordered: Any = collections.OrderedDict(a=1)
    ordered._metadata = {"x": object()}
    for value, path in [
        (object(), "sampler"),
        ({("a", 1): {2: [0, object()]}}, "sampler[('a', 1)][2][1]"),
        ({1: 2, object(): 3}, "sampler.keys()[1]"),
        ([{1, object()}], "sampler[0]{...}"),
        (collections.deque([1, object()]), "sampler[1]"),
        (ordered, "sampler.__dict__['_metadata']['x']"),
        ({"x" * 1000: object()}, "sampler['xxxxxxxxxxxx...xxxxxxxxxxxxx']"),
    ]:
        with pytest.raises(UnsupportedValue) as caught:
            dumps(value, name="sampler")
        assert caught.value.path == path


def test_depth_is_limited_alike_on_both_sides() -> None:
    def nest(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return value

    assert_round_trip(nest(MAX_DEPTH))
    with pytest.raises(UnsupportedValue, match="nested more than 64 deep"):
        dumps(nest(MAX_DEPTH + 1))
    one = b"\0\0\0\1"
    assert loads(encode([Ext(10, one)] * MAX_DEPTH + [1])) == nest(MAX_DEPTH)
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(BadValue, match="nested more than 64 deep"):
            loads(encode([Ext(10, one)] * levels + [1]))
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedValue, match="within itself"):
        dumps(cycle)


def test_neither_torch_nor_numpy_is_imported_for_values_that_need_neither() -> None:
    code = "import sys, checkmate.values as v; v.loads(v.dumps([1, {'a': (2.0,)}])); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'checkmate.values'" in modules
    assert "'torch'" not in modules
    assert "'numpy'" not in modules


# ---------------------------------------------------------------- malformed input

SAMPLE = {
    "t": torch.arange(6.0).reshape(2, 3),
    "n": [np.arange(3), np.float32(2), 2**100, 1j, "\ud800", bytearray(b"x")],
    ("k", 1): {1, 2, frozenset({3})},
    "o": collections.OrderedDict(a=collections.Counter("ab")),
    "q": (collections.deque([1], 2), torch.Size([2]), torch.float16, torch.device("cpu"), None, True, -0.0),
}


def bounded_loads(data: bytes) -> Any:
    """Decode, or None for `BadValue`; anything else, or memory out of proportion, fails the test."""
    tracemalloc.start()
    try:
        return loads(data)
    except BadValue:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50_000 + 1000 * len(data), (peak, len(data))


def test_every_truncation_is_bad() -> None:
    data = dumps(SAMPLE)
    assert strict_equal(loads(data), SAMPLE)
    for end in range(len(data)):
        with pytest.raises(BadValue):
            loads(data[:end])
    with pytest.raises(BadValue):
        loads(data + b"\0")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_flipped_bit_is_bad_or_another_value() -> None:
    data = dumps(SAMPLE)
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        back = bounded_loads(bytes(altered))
        assert back is None or not strict_equal(back, SAMPLE)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_random_bytes_are_bad_or_a_value(data: bytes) -> None:
    bounded_loads(data)


torch_names = st.sampled_from(
    [str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)]
)
pieces = st.one_of(
    st.builds(
        lambda tag, count: Ext(tag, count.to_bytes(4, "big")),
        st.sampled_from([form.tag for form in _FORMS.values()]) | st.integers(-128, 127),
        st.integers(0, 4) | st.sampled_from([2**31, 2**32 - 1]),
    ),
    st.builds(Ext, st.just(0), st.binary(max_size=16)),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 4),
    st.floats(),
    st.none(),
    st.booleans(),
    torch_names,
    st.sampled_from(["<f4", "|b1", "|O8", "<M8[s]", "i4,O", "cpu", "cuda:0", "_dynamo", "1" * 5000]),
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(st.lists(pieces, max_size=12))
@settings(deadline=None, max_examples=1000)
def test_well_formed_msgpack_of_any_meaning_is_bad_or_a_value(items: list[Any]) -> None:
    value = bounded_loads(encode(items))
    if value is not None:
        repr(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\xdd\xff\xff\xff\xff" + b"\x01" * 1000,
        b"\xdc\xff\xff" * 1000,  # arrays in arrays
        b"\x91" * 100_000,
        b"\x81\x01\x02",  # a map
        b"\x91\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\x91\xdb\xff\xff\xff\xff",  # text of 4 GiB
        b"\x91\xc9\xff\xff\xff\xff\x00",  # an ext of 4 GiB
        b"\x91\xa2\xff\xfe",  # no UTF-8
        encode([]),
        encode([1, 2]),
        encode([b"bin"]),
        encode([Ext(99, b"\0\0\0\0")]),
        encode([Ext(10, b"\xff" * 1000)]),  # a list longer than any integer of the machine
        encode([Ext(4, b"\0\0\0\1"), 10**12]),  # bytearray(10**12)
        encode([Ext(2, b"\0\0\0\1"), "7"]),
        encode([Ext(14, b"\0\0\0\1"), 1]),  # a key without a value
        encode([Ext(14, b"\0\0\0\4"), 1, 2, True, 3]),  # a key twice
        encode([Ext(14, b"\0\0\0\2"), Ext(10, b"\0\0\0\0"), 1]),  # a list as key
        encode([Ext(12, b"\0\0\0\2"), 1, 1.0]),
        encode([Ext(15, b"\0\0\0\1"), Ext(14, b"\0\0\0\2"), 1, 2]),  # an attribute without a name
        encode([Ext(17, b"\0\0\0\1"), -1]),
        encode([Ext(20, b"\0\0\0\1"), "_dynamo"]),
        encode([Ext(21, b"\0\0\0\1"), "no such device"]),
        encode([Ext(22, b"\0\0\0\1"), 2**63]),
        encode([Ext(23, b"\0\0\0\3"), "float32", Ext(11, b"\0\0\0\1"), 2, Ext(0, b"1234")]),
        encode([Ext(23, b"\0\0\0\3"), "float32", Ext(11, b"\0\0\0\1"), -1, Ext(0, b"1234")]),
        encode([Ext(23, b"\0\0\0\3"), "float32", Ext(11, b"\0\0\0\1"), 1, Ext(0, b"123")]),
        encode([Ext(23, b"\0\0\0\3"), "quint8", Ext(11, b"\0\0\0\1"), 1, Ext(0, b"1")]),
        encode([Ext(30, b"\0\0\0\3"), "|O8", Ext(11, b"\0\0\0\1"), 1, Ext(0, b"12345678")]),
        encode([Ext(30, b"\0\0\0\3"), "<f4", Ext(11, b"\0\0\0\1"), -1, Ext(0, b"1234")]),
        encode([Ext(30, b"\0\0\0\3"), "<f4", Ext(11, b"\0\0\0\1"), 2**62, Ext(0, b"1234")]),
        encode([Ext(30, b"\0\0\0\3"), "<f3", Ext(11, b"\0\0\0\1"), 1, Ext(0, b"123")]),
    ],
    ids=lambda data: data[:16].hex(),
)
def test_malformed_input_is_bad(data: bytes) -> None:
    loads(dumps(torch.ones(1)))  # imports and caches are not the input's doing
    assert bounded_loads(data) is None
    with pytest.raises(BadValue, match=r"^not an encoded value: .") as caught:
        loads(data)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, errors.ProtocolError)
    assert len(str(caught.value)) < 300


def test_nesting_ends_in_bad_value_however_deep_the_stack_may_grow() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        for data in (b"\x91" * 1_000_000, encode([Ext(11, b"\0\0\0\1")] * 1_000_000)):
            with pytest.raises(BadValue):
                loads(data)
    finally:
        sys.setrecursionlimit(limit)


def test_nan_payloads_survive_in_every_place() -> None:
    quiet, signalling = float_of_bits(0xFFF8000000000ABC), float_of_bits(0x7FF0000000000001)
    for nan in (quiet, signalling):
        assert math.isnan(nan)
        assert_round_trip([nan, complex(nan, nan), {nan: nan}, {nan}, np.array([nan]), torch.tensor([nan]).double()])
