"""A cluster on one machine: network namespaces as hosts, a bridge as the switch, real sockets and real packets.

    cm-w0  eth0 ── w0 ┐                    ┌ s0 ── eth0  cm-s0
    cm-w1  eth0 ── w1 ┤ data    (cm-switch)┤             10.77.1.1
           10.77.0.x  └─────────┬──────────┘
                         rules: marked packets that come in at w0, w1 also go out at s0
    cm-w0 mgmt0 ── m-w0 ─┐ mgmt ┌─ m-s0 ── mgmt0  cm-s0: 10.78.1.1, where the shadow listens

`plan` says what the lab is, as commands; `network` runs them and reads the network back; `cluster` holds it for as
long as it is needed; `job` runs a training job in it. Every name is ours by `plan.OURS`; nothing else is touched.
"""

from .cluster import Lab
from .network import LabError
from .plan import Shape

__all__ = ["Lab", "LabError", "Shape"]
