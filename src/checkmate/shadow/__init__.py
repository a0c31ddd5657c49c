"""The shadow: receives every step of a run, applies it, and so is the checkpoint. `DESIGN.md` here states the invariants."""
