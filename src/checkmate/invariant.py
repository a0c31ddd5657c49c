"""What may be cut without changing a bit: a table that tests derive anew from torch. Pure."""

#: Optimizers of ``torch.optim`` that compute each element alone, with the same bits on a slice as on the whole, for
#: dtypes in which the vector body and the scalar tail of a loop round alike.
INVARIANT = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
DTYPES = frozenset(("float32", "float64"))
