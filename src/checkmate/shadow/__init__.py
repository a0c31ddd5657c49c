"""The shadow: receives every step of a run, applies it, and so is the checkpoint. See `DESIGN.md` here."""
