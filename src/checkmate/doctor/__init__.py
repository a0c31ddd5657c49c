"""Does every copy arrive, once? Marked packets are sent for real, and what became of them is judged.

`probe` runs on each host and observes; `hosts` starts the probes, leads them through one examination, and gathers what
they saw; `judge` says what that means, and which command mends it. Only `judge` knows what is right. Where gradients go
by multicast, `multicast_probe`, `multicast_hosts` and `multicast_judge` do the same for datagrams.
"""

#: Kinds of packets: with little in them, and of full size (with the mark, or to the group); without the mark; to a host
#: alone; to a second group. So many of each are sent.
KINDS = SMALL, FULL, CONTROL, DIRECT, SECOND = ("small", "full", "control", "direct", "second")
PACKETS = 4
