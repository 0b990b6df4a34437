"""The parts of torch.cuda that are asked, where there is none."""


class FakeCuda:
    """The part of torch.cuda that a command asks before it moves anything."""

    def __init__(self, devices=2):
        self.devices, self.waits = devices, []

    def is_available(self):
        return self.devices > 0

    def device_count(self):
        return self.devices

    def synchronize(self, device):
        self.waits.append(device)


class FakeAllocator:
    """A GPU of 1000 bytes with 600 free; 200 are reserved, 150 of them in use."""

    def __init__(self, *, backend="native", expandable=False):
        self.backend, self.expandable = backend, expandable

    def mem_get_info(self, device):
        return 600, 1000

    def memory_reserved(self, device):
        return 200

    def memory_allocated(self, device):
        return 150

    def get_allocator_backend(self):
        return self.backend

    def memory_snapshot(self):
        return [{"is_expandable": False}, {"is_expandable": self.expandable}]
