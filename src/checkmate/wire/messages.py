"""Control messages and parts: small typed records in msgpack. Nothing here holds bulk bytes.

Fields of type ``bytes`` called *values* are `checkmate.values` encodings, opaque to the protocol. The conversation that
these messages form is drawn in ``docs/wire.md``; who may send what, when, is decided by `shadow.daemon` (per
connection) and `shadow.partition` (per run).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError, UsageError
from .packets import Flow

FEW, SOME, MANY = Meta(max_length=1 << 10), Meta(max_length=1 << 16), Meta(max_length=1 << 20)
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash = int  # 64 bits without sign: more than a bound can say
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Code = Annotated[bytes, Meta(max_length=32)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Word = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=65536)]
Shape = Annotated[list[Count], Meta(max_length=16)]
Numbers = Annotated[list[Count], MANY]  # of blocks or ranks
Groups = Annotated[list[Numbers], SOME]  # of one optimizer: the blocks of each
Entries = Annotated[dict[Word, bytes], SOME]  # of a sidecar: values by name


class _Record(Struct, array_like=True, forbid_unknown_fields=True):
    """A part of a message."""


class _Message(Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A whole message, told from others by its tag, which is the class name."""


# ---------------------------------------------------------------- what a run is made of


class Block(_Record):
    """A box of one FQN. `replicas` is an index into `Spec.replica_sets`: the ranks that hold the same box."""

    fqn: Name
    dtype: Name
    itemsize: Annotated[int, Meta(ge=1, le=16)]
    offsets: Shape
    sizes: Shape
    global_sizes: Shape
    replicas: Count = 0
    trainable: bool = True

    @property
    def nbytes(self) -> int:
        count = self.itemsize
        for size in self.sizes:
            count *= size
        return count


class Optimizer(_Record):
    """An optimizer class by name, with the hyper-parameters of its groups and their blocks, at attach.

    There is one for each optimizer of each lead, with the blocks that this rank leads. Those of one rank stand in the
    order in which it numbers them, as its replicas do.
    """

    module: Name
    name: Name
    groups: bytes  #: values: list of dict, one per param group, without "params"
    members: Groups  #: block numbers of each group, in the group's order
    rank: Count = 0  #: the lead


class Fingerprint(_Record):
    """Numeric fingerprint: equal ones give equal bits."""

    torch: Word
    capability: Word
    threads: int
    flush_denormal: bool
    device: Word


class Spec(_Record):
    """What a shadow must know to hold a run: the layout's input, the optimizers, the numerics."""

    world_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    replica_sets: Annotated[list[Numbers], MANY]
    blocks: Annotated[list[Block], MANY]
    optimizers: Annotated[list[Optimizer], SOME]
    fingerprint: Fingerprint
    replay: Word = "match"
    aliases: Annotated[dict[Name, Name], MANY] = {}  #: FQN of a tied parameter -> FQN of its block
    tap: Word = "step"  #: else "mirror" or "multicast": frames come through the network too, in slices that parts name


class Incarnation(_Record):
    """A training attempt: numbers order attempts within one lineage, the id tells them apart."""

    number: Count
    id: Id

    def __str__(self) -> str:
        return f"{self.number}/{self.id.hex()[:8]}"


class Attempt(_Record):
    """Who asks to train: enough to tell a restart of the same job from a second job, and to name it in a message."""

    id: Id
    host: Word
    pid: int
    job: Word = ""  #: the launcher's job id, "" if there is none
    restarts: int = 0  #: the launcher's restart count of that job


# ---------------------------------------------------------------- parts


class Shard(_Record):
    """Where the shadow finds bytes ``[offset, offset + nbytes)`` of a gradient, with the network tap.

    In the frames of `round` that say `update`, which the network has copied to it; `round` 0: in those that this rank
    has sent for the very update. The optimizer used these bytes multiplied by `factor`.
    """

    block: Count
    offset: Count
    nbytes: Count
    update: Count
    round: Annotated[int, Meta(ge=0, le=65535)]
    factor: float = 1.0


class Update(_Record):
    """One ``optimizer.step()`` that happened. Ranks other than a lead leave `groups` empty and `members` None."""

    optimizer: Count  #: as this rank numbers its own
    blocks: Numbers  #: blocks with a gradient, ascending
    agreement: Hash  #: XXH3-64 over the whole record as this rank saw it
    groups: bytes = b""  #: values: hyper-parameters by value as this update used them
    members: Groups | None = None  #: of blocks that this rank leads; sent when changed since the last update sent
    scaling: bytes = b""  #: values: (grad_scale, found_inf) of an optimizer that unscales by itself
    shards: Annotated[list[Shard], MANY] | None = None  #: this rank's; None: its slices of the layout, all sent


class Entry(_Record):
    """One tensor of a block's state. Entry 0 is the parameter, named ""; others are keys of the optimizer's state."""

    key: Word
    dtype: Name
    sizes: Shape
    nbytes: Count


class Anchor(_Record):
    """A block's whole state at the end of this step; its bytes come in ANCHOR frames."""

    block: Count
    optimizer: int  #: which of this rank's optimizers has the block, -1 for none
    entries: Annotated[list[Entry], Meta(max_length=64)]
    values: bytes  #: values: dict of optimizer state that is not a tensor
    reason: Text = ""


class Digest(_Record):
    """XXH3-64 of bytes ``[offset, offset + nbytes)`` of an entry as the step ends, or of a gradient (key "grad")."""

    block: Count
    key: Word
    offset: Count
    nbytes: Count
    digest: Hash


class Part(_Message):
    """Closes `step` for `rank`. Complete once everything that it lists has arrived."""

    rank: Count
    step: Count
    epoch: Count
    gap: bool = False  #: this rank could not keep its gradients: the epoch ends before this step
    begins: bool = False  #: closes nothing: this rank streams this epoch from the step after this one
    updates: Annotated[list[Update], SOME] = []
    anchors: Annotated[list[Anchor], MANY] = []
    audits: Annotated[list[Digest], MANY] = []
    gradients: Annotated[list[Digest], MANY] = []  #: of whole blocks: replicas must agree on them
    groups: Annotated[list[bytes], SOME] | None = None  #: values: each optimizer's groups, of a lead; None: as before
    members: Annotated[list[Groups], SOME] | None = None  #: of each, the blocks that this lead leads; None: as before
    sidecar: Entries = {}  #: names not listed stand as before
    dropped: Annotated[list[Word], SOME] = []  #: sidecar names that exist no more


# ---------------------------------------------------------------- greeting, any connection


class Hello(_Message):
    """First message of a client. `nonce` proves nothing by itself; see `auth`."""

    versions: Annotated[list[int], Meta(max_length=64)]
    role: Word  #: one of `auth.ROLES`
    nonce: Id
    capabilities: Annotated[list[Word], Meta(max_length=64)] = []


class Challenge(_Message):
    """Server's answer: the version it chose, its own nonce and, with a token, its proof."""

    version: int
    nonce: Id
    proof: Code = b""
    capabilities: Annotated[list[Word], Meta(max_length=64)] = []


class Proof(_Message):
    proof: Code = b""


class Welcome(_Message):
    server: Word  #: e.g. "checkmate 0.1.0"


class Refusal(_Message):
    """Why not. `reason` is for people, `kind` for programs: one of `REFUSALS`."""

    kind: Word
    reason: Text


REFUSALS = (
    "version",
    "token",
    "usage",
    "live",
    "superseded",
    "mismatch",
    "memory",
    "missing",
    "busy",
    "unsupported",
)


# ---------------------------------------------------------------- control connection: restart, then streaming

#: Longest name of a run, in bytes of UTF-8.
RUN_NAME_LIMIT = 200
#: A live attempt whose ranks have been silent for longer may be displaced by another.
LEASE_S = 10.0


class Prepare(_Message):
    """Fence everything older of this run and report what can be reached. Idempotent per attempt id."""

    run: Name
    attempt: Attempt
    fresh: bool = False


class Prepared(_Message):
    incarnation: Incarnation
    steps: Numbers  #: whole steps that can be adopted, ascending; empty: the shadow holds nothing of the run
    world_size: Count = 0  #: of the attempt that wrote them
    holder: Incarnation | None = None


class Adopt(_Message):
    """Go on from `step` (None: from nothing) with this spec. Idempotent."""

    run: Name
    incarnation: Incarnation
    step: int | None
    spec: Spec


class Adopted(_Message):
    epoch: Count
    life: Count
    fingerprint: Fingerprint  #: of the shadow


class Join(_Message):
    """One rank's control connection is ready to stream. `spec` comes along when the shadow did not know the run."""

    run: Name
    incarnation: Incarnation
    rank: Count
    epoch: Count
    life: Count  #: of the shadow's memory as this rank knows it, 0: unknown
    step: Count  #: newest step that this rank has closed
    spec: Spec | None = None
    attempt: Attempt | None = None  #: comes along with the spec
    flow: Flow | None = None  #: with the network tap: by what a shadow knows the packets that it gets copies of


class Joined(_Message):
    epoch: Count
    life: Count
    received: int  #: the rank goes on sending from the step after this one
    known: bool = True  #: False: send `Join` again with the spec


class Attach(_Message):
    """First message of a data connection, after the greeting. Only frames of this incarnation and rank follow."""

    run: Name
    incarnation: Incarnation
    rank: Count
    epoch: Count


class Ack(_Message):
    """applied <= stable <= received, all of `epoch`. What it claims: received in the memory of this replica."""

    epoch: Count
    received: int
    stable: int
    applied: int
    recovery: int  #: newest step that a restart would find, -1 if none


class Stable(_Message):
    """Rank 0 to every shadow: all replicas in the view have received `step`."""

    epoch: Count
    step: Count


class Resume(_Message):
    """Stream gradients again, from your next step on, as `epoch`. Everything staged for older epochs is void."""

    epoch: Count
    reason: Text


class Anchoring(_Message):
    """Every rank streams: send the blocks that you own at a step of your choice from `step` on."""

    epoch: Count
    step: Count


class Reanchor(_Message):
    """These blocks differ: their owners send their state at the end of a step of their choice."""

    epoch: Count
    blocks: Numbers
    reason: Text


class Repair(_Message):
    """Send these pieces of `step` again, from memory, on the data connection: the network has not brought them."""

    epoch: Count
    step: Count
    items: Annotated[list[tuple[Count, Count, Count, Count, Count]], MANY]  #: block, update, round, offset, nbytes


class Report(_Message):
    """Something to tell the user. `kind`: "differs" (audit), "replicas", "refused", "memory", "note"."""

    kind: Word
    text: Text
    step: Count = 0
    fatal: bool = False


class Ping(_Message):
    step: Count  #: newest step that this rank has closed


class Pong(_Message):
    pass


class Audit(_Message):
    """Compare these digests with the state at `step`, which is the newest."""

    step: Count
    digests: Annotated[list[Digest], MANY]


class Audited(_Message):
    step: Count
    compared: Count
    differing: Annotated[list[Digest], MANY]
    moved: bool = False  #: the shadow no longer stands at that step


# ---------------------------------------------------------------- reader and admin connections


class Lease(_Message):
    """Hold one whole step for reading. step None: the newest. Released by closing the connection."""

    run: Word  #: "": the only run there is
    step: int | None = None


class Held(_Record):
    """A block as the lease holds it."""

    block: Block
    optimizer: int  #: index into `Leased.optimizers`, -1 for none
    entries: Annotated[list[Entry], Meta(max_length=64)]
    values: bytes


class Leased(_Message):
    run: Name
    incarnation: Incarnation
    step: Count
    world_size: Count
    held: Annotated[list[Held], MANY]
    optimizers: Annotated[list[Optimizer], SOME]  #: with groups and members of the end of the step
    aliases: Annotated[dict[Name, Name], MANY]
    sidecars: Annotated[dict[Count, Annotated[list[Word], SOME]], MANY]  #: names by rank
    fingerprint: Fingerprint
    replica_sets: Annotated[list[Numbers], MANY]  #: of the ranks that closed the step, to whom the sidecars belong


class Read(_Message):
    """Answered by one or more STATE frames per item, in order: (block, entry, offset, nbytes)."""

    items: Annotated[list[tuple[Count, Count, Count, Count]], MANY]


class ReadSidecar(_Message):
    rank: Count


class Sidecar(_Message):
    entries: Entries


class GetStatus(_Message):
    pass


class Status(_Message):
    runs: Annotated[list[dict[Word, Any]], SOME]
    server: dict[Word, Any]


class Remove(_Message):
    run: Name
    force: bool = False


class Done(_Message):
    text: Text = ""


Control = (
    Hello | Challenge | Proof | Welcome | Refusal | Prepare | Prepared | Adopt | Adopted | Join | Joined | Attach
    | Ack | Stable | Resume | Anchoring | Reanchor | Repair | Report | Ping | Pong | Audit | Audited
    | Lease | Leased | Read | ReadSidecar | Sidecar | GetStatus | Status | Remove | Done
)  # fmt: skip


def check_run_name(name: str) -> None:
    """Raises UsageError unless `name` can serve as a file name everywhere: it may end up as one."""
    ok = (
        name.isprintable()
        and 0 < len(name.encode()) <= RUN_NAME_LIMIT
        and not set(name) & set('/\\:*?"<>|')
        and name.strip(". ") == name
    )
    if not ok:
        raise UsageError(
            f"run name {name[:40]!r}: use 1 to {RUN_NAME_LIMIT} printable characters, none of them one of "
            '/ \\ : * ? " < > |, and neither dot nor blank at its ends'
        )


_encoder = msgspec.msgpack.Encoder()
_control = msgspec.msgpack.Decoder(Control)
_part = msgspec.msgpack.Decoder(Part)


def encode(message: Control | Part) -> bytes:
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], what: str, data: bytes | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed {what}: {error}") from None


def decode(data: bytes | memoryview) -> Control:
    """Parse a CONTROL payload."""
    return _decode(_control, "control message", data)  # type: ignore[no-any-return]


def decode_part(data: bytes | memoryview) -> Part:
    """Parse a PART payload."""
    return _decode(_part, "part", data)  # type: ignore[no-any-return]
