"""Connections: the interface (`base`), sockets (`tcp`), and an in-memory twin with seeded faults (`memory`)."""
