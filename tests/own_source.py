"""A user's own image source: the protocol and nothing else."""

from PIL import Image


class Greys:
    """Plain images of the given grey levels, dark or light."""

    def __init__(self, values):
        self.values, self.classes = values, ["dark", "light"]

    def __len__(self):
        return len(self.values)

    def read(self, index):
        return Image.new("RGB", (40, 40), (self.values[index],) * 3)

    def label(self, index):
        return int(self.values[index] > 127)

    def name(self, index):
        return f"grey/{self.values[index]}"

    def fingerprint(self):
        return repr(self.values)
