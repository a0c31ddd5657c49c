"""The training side: what `attach` hooks in, and what carries it to the shadow.

tap         optimizer hooks: when an update happens, and with which gradients
changes     what was changed outside the optimizer
sidecar     RNG, buffers, the user's own objects
staging     host memory that holds a step until the shadow has it
link        the two connections and their threads
checkpointer    `attach` … `close`, which ties these together
"""
