"""Does every copy arrive, once? Marked packets are sent for real, and what became of them is judged.

`probe` runs on each host and observes; `hosts` starts the probes, leads them through one examination, and gathers what
they saw; `judge` says what that means, and which command mends it. Only `judge` knows what is right.
"""

#: Kinds of packets: marked, with little in them; marked, of full size; without the mark. So many of each are sent.
KINDS = SMALL, FULL, CONTROL = ("small", "full", "control")
PACKETS = 4
