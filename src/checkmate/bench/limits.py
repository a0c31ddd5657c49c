"""Limits beside which the benchmarks put their numbers: raw TCP, and torch's optimizer alone; and a GPT's shapes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

import torch

from ..demo.gpt import GPT
from ..tensors import bytes_of
from ..transport.tcp import Address, listen, parse_address

#: Bytes of one raw send or receive; larger ones are not faster.
PIECE_BYTES = 1 << 20
LEARNING_RATE = 1e-3


def gpt(parameters: int) -> GPT:
    """A GPT with about so many parameters, in the proportions that are usual: a layer for every 64 of width."""
    width = max(64, 64 * round((parameters * 64 / 12) ** (1 / 3) / 64))
    layers = max(1, round(parameters / (12 * width**2)))
    return GPT(context=64, width=width, heads=width // 64, layers=layers, dropout=0.0)


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """The shapes of that GPT's parameters."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in gpt(parameters).parameters()]


def noise(nbytes: int) -> torch.Tensor:
    """Plausible gradients, fp32, all in one piece: normal, with a deviation of 0.01."""
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0)).mul_(0.01)


class RawSender:
    """Sends bytes over plain TCP to any number of receivers at once."""

    def __init__(self) -> None:
        self._listener = listen(parse_address("127.0.0.1:0"))
        self.address = str(Address(*self._listener.getsockname()[:2]))

    def send(self, memory: memoryview, num_receivers: int, times: int) -> None:
        """Send `memory` so many times to each of the next receivers that connect; returns when all have it."""
        connections = [self._listener.accept()[0] for _ in range(num_receivers)]
        threads = [threading.Thread(target=self._send, args=(c, memory, times)) for c in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _send(connection: socket.socket, memory: memoryview, times: int) -> None:
        with connection:
            for _ in range(times):
                for start in range(0, len(memory), PIECE_BYTES):
                    connection.sendall(memory[start : start + PIECE_BYTES])
            connection.recv(1)  # the receiver says that it has everything


def raw_receive(address: str, memory: memoryview, times: int) -> tuple[float, float]:
    """Receive `times` times as many bytes as `memory` has, into it; the seconds and processor seconds that took."""
    with socket.create_connection(parse_address(address)) as connection:
        began, cpu = time.perf_counter(), time.thread_time()
        for _ in range(times):
            at = 0
            while at < len(memory):
                count = connection.recv_into(memory[at : at + PIECE_BYTES])
                if count == 0:
                    raise ConnectionResetError("the raw sender has gone")
                at += count
        taken = time.perf_counter() - began, time.thread_time() - cpu
        connection.send(b".")
    return taken


class Optimizing:
    """AdamW over parameters of these shapes, with torch's default flags or fused."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        flat = noise(sum(p.numel() for p in self._params) * 4)
        pieces = flat.split([p.numel() for p in self._params])
        for param, piece in zip(self._params, pieces, strict=True):
            param.grad = piece.view_as(param)

    def measure(self, fused: bool | None, times: int) -> tuple[float, float]:
        """Seconds, and processor seconds, of so many steps."""
        optimizer = torch.optim.AdamW(self._params, lr=LEARNING_RATE, fused=fused)
        optimizer.step()  # makes its state
        began, cpu = time.perf_counter(), time.thread_time()
        for _ in range(times):
            optimizer.step()
        return time.perf_counter() - began, time.thread_time() - cpu


def warmed(nbytes: int) -> memoryview:
    """Memory that the kernel has mapped already."""
    return bytes_of(torch.zeros(nbytes, dtype=torch.uint8))
