"""Memory that processes of a CPU share, for tests of what GPUs do in each other's."""

import torch

from nanomegatron import comm
from nanomegatron.fast.peer_memory import PeerMemory

CPU = torch.device("cpu")


class LateCopy:
    """A copy that is made when it is waited for, after those begun before it."""

    def __init__(self, memory, out, source):
        self.memory, self.pair = memory, (out, source)

    def wait(self):
        while self in self.memory.late:
            copy = self.memory.late.pop(0)
            copy.pair[0].copy_(copy.pair[1])


class FileMemory(PeerMemory):
    """Files in place of GPU memory; the rest, the slots and who waits for what, is the real thing."""

    def __init__(self, axis, kind, folder, slots=2):
        super().__init__(axis, CPU, kind, slots)
        self.folder, self.late = folder, []

    def allocate(self, size):
        names = [f"{self.folder}/{self.kind}-{size}-{rank}" for rank in self.axis.ranks]
        shape = self.slots, size
        torch.from_file(names[self.axis.rank], True, self.slots * size, dtype=torch.uint8).fill_(255)
        comm.barrier(self.axis)
        maps = [torch.from_file(name, True, self.slots * size, dtype=torch.uint8) for name in names]
        return [whole.view(shape) for whole in maps]

    def record(self, k):
        return None

    def barrier_before_copies(self, ready):
        comm.barrier(self.axis)

    def copy(self, *copies):
        self.late += (late := [LateCopy(self, *pair) for _, *pair in copies])
        return late

    def wait_copies(self):
        if self.late:
            self.late[-1].wait()

    def barrier(self):
        comm.barrier(self.axis)
