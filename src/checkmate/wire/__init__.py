"""The wire protocol, sans-I/O: bytes and time in, bytes and events out. No sockets, files, threads or torch here."""
