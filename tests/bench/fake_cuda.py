"""The part of torch.cuda that bench asks, where there is none."""


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
