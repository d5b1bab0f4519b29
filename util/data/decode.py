"""From a file to the pixels of a crop: upright, 8 bits per channel, decoding no more than the crop needs.

A JPEG is decoded from its top to the last row of the crop, at 1/2, 1/4 or 1/8 scale where the crop is large enough: by
simplejpeg if installed, else by Pillow, with identical pixels. Other files, and all files with --exact_decode, are
decoded whole and resized by Pillow, as torchvision does.
"""

import io
import math
import re
import struct
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError

from util.crop import Crop

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # channels to PIL mode
SIMPLEJPEG_MODES = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}

# A crop decoded at a smaller scale stays at least this many times larger than the output. The result then differs from
# the exact pipeline's by less than 1 of 255 on average (with a factor of 1, by about 3).
OVERSIZE = 2

ORIENTATION = 0x0112  # EXIF tag
# JPEG markers. Frames: Huffman coding, baseline, extended or progressive. Segments: what may come before and between
# scans. In compressed data, FF is followed by 0 or begins a restart marker, so any other marker ends a scan.
END, SCAN, PROGRESSIVE = b"\xff\xd9", 0xDA, 0xC2
FRAMES, SEGMENTS = {0xC0, 0xC1, PROGRESSIVE}, {0xC4, SCAN, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")
METADATA = {b"Exif": "exif", b"http://ns.adobe.com/xap/1.0/": "xmp"}  # where JPEGs store it, and Pillow's names
# How to make an image upright: transpose; then mirror left-right; then top-bottom.
UPRIGHT = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


# --- Whole images ---


def to_mode(data: bytes | Image.Image, mode: str) -> Image.Image:
    """The image, given as such or as the content of a file: upright, with 8 bits in each channel of `mode`."""
    image = open_image(data) if isinstance(data, bytes) else data
    image.load()  # Pillow turns a TIFF upright here, and drops the tag
    turns = (Image.Transpose.TRANSPOSE, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM)
    for turn, needed in zip(turns, UPRIGHT[orientation_of(image)], strict=True):
        image = image.transpose(turn) if needed else image
    if image.mode.startswith("I"):  # 16-bit PNG and TIFF, which PIL would clip at 255
        image = Image.fromarray(np.rint(np.clip(np.asarray(image), 0, 65535) / 257).astype(np.uint8))
    return image.convert(mode)


def open_image(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:  # its message contains an address that changes every time
        raise OSError("cannot identify its format" if data else "the file is empty") from None


def orientation_of(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # PIL raises almost anything; damaged metadata does not make the pixels unreadable
        return 1
    return orientation if orientation in UPRIGHT else 1


def exact_crop(image: Image.Image, box: Crop, size: tuple[int, int]) -> torch.Tensor:
    """The crop, resized to `size` (height, width) by PIL's bicubic filter; uint8 [H, W, C]."""
    top, left, height, width = box
    crop = image.crop((left, top, left + width, top + height)).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(crop)).view(*size, -1)


# --- JPEG files ---


@dataclass(frozen=True)
class Jpeg:
    """A complete JPEG file of a common kind: its bytes, and information from its header."""

    data: bytes
    stored: tuple[int, int]  # height and width, as stored
    height_at: int  # offset of the height in the header
    one_pass: bool  # rows are stored from top to bottom, and nothing follows them
    orientation: int

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the upright image."""
        height, width = self.stored
        return (width, height) if UPRIGHT[self.orientation][0] else (height, width)


def read_jpeg(data: bytes) -> Jpeg | None:
    """None for files that are left to Pillow to decode or reject, as in evaluations: other formats, CMYK, rare
    encodings, more pixels than it allows, truncated files, and files with unexpected markers.

    Whether a file is readable thus does not depend on the crop: a decoder would not notice damage below it.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    frame, metadata, scans = None, {}, 0
    marker, at = 0, 2
    try:
        while data[at : at + 2] != END:
            marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
            if data[at] != 0xFF or length < 2 or marker not in (SEGMENTS if frame else SEGMENTS | FRAMES):
                return None
            if marker in FRAMES:
                frame = (at + 5, marker == PROGRESSIVE, *struct.unpack_from(">BHHB", data, at + 4))
            elif marker == 0xE1:
                name, _, content = data[at + 4 : at + 2 + length].partition(b"\0")
                if name in METADATA:
                    metadata.setdefault(METADATA[name], content.removeprefix(b"\0"))
            at += 2 + length
            if marker == SCAN:
                scans, at = scans + 1, next(MARKER.finditer(data, at)).start()
    except (IndexError, struct.error, StopIteration):
        return None
    if frame is None or not scans or at + 2 != len(data):
        return None
    height_at, progressive, bits, height, width, channels = frame
    if bits != 8 or channels not in (1, 3) or not 0 < height * width <= 2 * (Image.MAX_IMAGE_PIXELS or math.inf):
        return None
    one_pass = scans == 1 and marker == SCAN and not progressive
    return Jpeg(data, (height, width), height_at, one_pass, orientation_in(metadata))


def orientation_in(metadata: dict[str, bytes]) -> int:
    if not metadata:
        return 1
    image = Image.new("L", (1, 1))  # lets Pillow parse it, as for whole images
    image.info.update(metadata)
    return orientation_of(image)


def jpeg_crop(jpeg: Jpeg, box: Crop, size: tuple[int, int], mode: str) -> torch.Tensor:
    """The crop of the upright image, resized to `size` (height, width); uint8 [H, W, C]."""
    exchange, mirror, flip = UPRIGHT[jpeg.orientation]
    (top, left, height, width), (whole_height, whole_width) = box, jpeg.size
    if mirror:
        left = whole_width - left - width
    if flip:
        top = whole_height - top - height
    box = (left, top, width, height) if exchange else (top, left, height, width)
    pixels = stored_crop(jpeg, box, (size[1], size[0]) if exchange else size, mode)
    if exchange:
        pixels = pixels.transpose(0, 1)
    dims = [dim for dim, turned in ((0, flip), (1, mirror)) if turned]
    return (pixels.flip(dims) if dims else pixels).contiguous()


def stored_crop(jpeg: Jpeg, box: Crop, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Like `jpeg_crop`, in the coordinates of the stored image."""
    top, left, height, width = box
    scale = choose_scale(height / size[0], width / size[1])
    pixels = decode(jpeg, top + height, scale, mode)
    if scale == 1:
        # torch's filter for bytes is vectorised for contiguous, channels-last images.
        crop = torch.from_numpy(np.array(pixels[top : top + height, left : left + width]))[None].permute(0, 3, 1, 2)
        return F.interpolate(crop, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    # The crop's edges now fall between pixels, which torch's filter does not support.
    y, x = top // scale, left // scale
    part = pixels[y : -(-(top + height) // scale), x : -(-(left + width) // scale)]
    edges = (left / scale - x, top / scale - y, (left + width) / scale - x, (top + height) / scale - y)
    image = Image.fromarray(part if mode != "L" else part[:, :, 0])
    resized = image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=edges)
    return torch.from_numpy(np.array(resized)).view(*size, -1)


def choose_scale(*ratios: float) -> int:
    """The divisor at which to decode a crop whose sides exceed the output's by `ratios`."""
    return next((scale for scale in (8, 4, 2) if min(ratios) >= OVERSIZE * scale), 1)


def decode(jpeg: Jpeg, rows: int, scale: int, mode: str) -> np.ndarray:
    """At least the first `rows` rows, at 1 / `scale` of the size; uint8 [H, W, C]."""
    data, (height, width) = jpeg.data, jpeg.stored
    rows += 2 * scale  # chroma upsampling looks at the next chroma row, which may be two rows high
    cut = jpeg.one_pass and rows < height
    if cut:
        # Decoders stop after the number of rows in the header.
        height, data = rows, bytearray(data)
        struct.pack_into(">H", data, jpeg.height_at, height)
    pixels = with_simplejpeg(data, (-(-height // scale), -(-width // scale)), mode, cut)
    if pixels is not None:
        return pixels
    image = Image.open(io.BytesIO(data))
    image.draft(mode, (width // scale, height // scale))
    return np.asarray(image.convert(mode)).reshape(image.height, image.width, -1)


def with_simplejpeg(data: bytes | bytearray, size: tuple[int, int], mode: str, cut: bool) -> np.ndarray | None:
    """None for files it rejects, as Pillow may be less strict. Extra bytes after a cut are not an error."""
    if simplejpeg is None:
        return None
    (height, width), pixels = size, np.empty((*size, len(mode)), np.uint8)
    try:
        return simplejpeg.decode_jpeg(data, SIMPLEJPEG_MODES[mode], min_height=height, min_width=width, buffer=pixels)
    except ValueError as error:
        return pixels if cut and "extraneous bytes" in str(error) else None
