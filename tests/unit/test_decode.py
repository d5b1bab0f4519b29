"""Any image file to the pixels of a crop: fast and exact, for every kind of file in the wild."""

import io
import random
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms as v1

from util.crop import draw_crop
from util.data import decode
from util.data.decode import choose_scale, exact_crop, jpeg_crop, read_jpeg, to_mode
from util.datasets import Augmentation, normalise

SIZE = (48, 64)


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    """Each decoder in turn."""
    if request.param == "pillow":
        monkeypatch.setattr(decode, "simplejpeg", None)
    elif decode.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")


def photo(width, height, seed=0):
    """No symmetry, soft and hard edges, and colours that differ from place to place."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    image = np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    image[height // 3 : height // 2, width // 5 : width // 3] = (250, 20, 60)
    return Image.fromarray(image)


def content(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 95} if kind == "JPEG" else {}), **options)
    return file.getvalue()


def fast(data, box, size=SIZE, mode="RGB"):
    return jpeg_crop(read_jpeg(data), box, size, mode)


def exact(data, box, size=SIZE, mode="RGB"):
    return exact_crop(to_mode(data, mode), box, size)


def difference(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype == torch.uint8
    return (a.int() - b.int()).abs().float().mean().item()


def boxes(width, height, number=8):
    rng = random.Random(0)
    return [draw_crop(height, width, rng) for _ in range(number)] + [(0, 0, height, width), (height - 1, 0, 1, 1)]


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_fast_crops_equal_exact_ones(subsampling, progressive, mode):
    data = content(photo(150, 109), subsampling=subsampling, progressive=progressive)
    for box in boxes(150, 109):
        assert difference(fast(data, box, mode=mode), exact(data, box, mode=mode)) < 0.7, box


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_decoding_stops_below_the_crop_and_changes_no_row_above(subsampling):
    data = content(photo(150, 109), subsampling=subsampling, restart_marker_rows=2)
    jpeg, whole = read_jpeg(data), np.asarray(Image.open(io.BytesIO(data)))
    for rows in (1, 7, 8, 9, 15, 16, 17, 32, 50, 106):
        part = decode.decode(jpeg, rows, 1, "RGB")
        assert rows <= len(part) < 109
        assert np.array_equal(part[:rows], whole[:rows])


def test_decoders_agree_to_the_bit(monkeypatch):
    """So a run can resume on a machine with the other decoder."""
    pytest.importorskip("simplejpeg")
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        jpeg = read_jpeg(content(photo(333, 250), subsampling=subsampling))
        for scale in (1, 2, 4, 8):
            for mode in ("L", "RGB"):
                ours = decode.decode(jpeg, 101, scale, mode)
                with monkeypatch.context() as without:
                    without.setattr(decode, "simplejpeg", None)
                    assert np.array_equal(decode.decode(jpeg, 101, scale, mode), ours)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_large_crops_are_decoded_small(subsampling):
    data = content(photo(1201, 903), subsampling=subsampling)
    for box in ((101, 203, 501, 703), (0, 0, 903, 1201), (402, 500, 501, 701)):
        assert choose_scale(box[2] / SIZE[0], box[3] / SIZE[1]) > 1
        assert difference(fast(data, box), exact(data, box)) < 1.5, box
    assert decode.decode(read_jpeg(data), 800, 4, "RGB").shape == (202, 301, 3)


def test_scale_leaves_twice_the_pixels_that_are_needed():
    assert [choose_scale(r, 100) for r in (0.3, 1, 3.9, 4, 7.9, 8, 16, 99)] == [1, 1, 1, 2, 2, 4, 8, 8]
    assert choose_scale(100, 1) == 1, "the smaller ratio counts"


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("where", ["exif", "xmp"])
def test_rotated_by_metadata(orientation, where):
    """Upright as ImageOps.exif_transpose makes it, before cropping."""
    exif, xmp = Image.Exif(), f'<x tiff:Orientation="{orientation}"/>'.encode()
    exif[decode.ORIENTATION] = orientation
    data = content(photo(150, 109), **({"exif": exif} if where == "exif" else {"xmp": xmp}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert (to_mode(data, "RGB").size, read_jpeg(data).size) == (upright.size, upright.size[::-1])
    for box in ((10, 20, 50, 70), (40, 3, 60, 80), (0, 0, upright.height, upright.width)):
        expected = exact_crop(upright, box, SIZE)
        assert difference(exact(data, box), expected) == 0
        assert difference(fast(data, box), expected) < 0.7


def test_rotation_of_other_formats():
    exif = Image.Exif()
    exif[decode.ORIENTATION] = 6
    for kind in ("PNG", "TIFF", "WEBP"):
        assert to_mode(content(photo(40, 30), kind, exif=exif), "RGB").size == (30, 40), kind


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_metadata_are_no_reason_to_refuse_an_image(exif):
    data = content(photo(40, 30), exif=exif)
    assert to_mode(data, "RGB").size == (40, 30)
    assert read_jpeg(data).orientation == 1


RED = (200, 30, 40)


def red(mode):
    image = Image.new("RGB", (40, 30), RED)
    return image.quantize() if mode == "P" else image.convert(mode)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("in_chans", [1, 3, 4])
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("RGB", kind) for kind in ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")),
        *(("L", "JPEG"), ("CMYK", "JPEG"), ("CMYK", "TIFF")),
        *(("RGBA", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("YCbCr", "TIFF")),
    ],
)
def test_any_kind_of_file(mode, kind, in_chans, exactly):
    options = {"lossless": True} if kind == "WEBP" else {}
    options |= {"compression": "tiff_lzw"} if mode == "YCbCr" else {}  # before 13, Pillow cannot read its own raw ones
    augment = Augmentation(SIZE, decode.MODES[in_chans], draw_crop, exactly)
    pixels = augment(content(red(mode), kind, **options), random.Random(0))
    assert (pixels.shape, pixels.dtype) == ((in_chans, *SIZE), torch.uint8)
    grey = np.asarray(Image.new("RGB", (1, 1), RED).convert("L")).item()
    colour = [grey] * 3 if mode in ("L", "LA") else list(RED)
    expected = {1: [grey], 3: colour, 4: [*colour, 255]}[in_chans]
    assert (pixels.float().mean(dim=(1, 2)) - torch.tensor(expected)).abs().max() < 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_sixteen_bits_are_scaled_and_not_clipped(kind, in_chans):
    values = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(SIZE)
    pixels = np.asarray(to_mode(content(Image.fromarray(values), kind), decode.MODES[in_chans]))
    expected = np.rint(values / 65535 * 255)
    assert np.array_equal(pixels if in_chans == 1 else pixels[:, :, 0], expected)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.97])
def test_a_file_cut_short_is_refused_wherever_the_crop_lies(share, exactly, progressive):
    data = content(photo(150, 109), progressive=progressive)
    augment = Augmentation(SIZE, "RGB", lambda *_: (0, 0, 1, 1), exactly)
    augment(data, random.Random(0))
    with pytest.raises(OSError, match=r"(?i)truncated|cannot identify"):
        augment(data[: int(share * len(data))], random.Random(0))


def damaged(data, rng):
    """A few bytes changed, zeroed, removed or moved, anywhere in the file."""
    at, other, length = rng.randrange(len(data)), rng.randrange(len(data)), rng.choice((1, 4, 50, 200))
    new = rng.choice(
        (rng.randbytes(length), bytes(length), b"\xff" * length, b"", b"\xff" + rng.randbytes(1), data[other:][:length])
    )
    return data[:at] + new + data[at + length :]


def is_read(decode_it):
    try:
        decode_it()
    except Exception:  # on damaged files, decoders raise almost anything
        return False
    return True


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 2}], ids=str)
def test_training_refuses_the_damaged_files_that_evaluations_refuse(options):
    """Wherever the crop lies: a file used in pretraining but not in evaluations would make comparisons unfair."""
    data, rng, refused = content(photo(150, 109), subsampling="4:2:0", **options), random.Random(0), 0
    augment = Augmentation(SIZE, "RGB", lambda *_: (0, 0, 8, 8))
    for case in range(150):
        broken = damaged(data, rng)
        readable = is_read(lambda: to_mode(broken, "RGB"))  # noqa: B023 (called at once)
        assert is_read(lambda: augment(broken, random.Random(0))) == readable, case  # noqa: B023
        refused += not readable
    assert 20 < refused < 130


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("exactly", [False, True])
def test_no_memory_is_spent_on_more_pixels_than_pillow_allows(exactly):
    data = content(photo(150, 109))
    huge = data.replace(struct.pack(">HH", 109, 150), struct.pack(">HH", 65500, 65500), 1)
    with pytest.raises(Image.DecompressionBombError):
        Augmentation(SIZE, "RGB", lambda *_: (0, 0, 8, 8), exactly)(huge, random.Random(0))


@pytest.mark.usefixtures("decoder")
def test_bytes_after_the_end_do_no_harm():
    data, box = content(photo(150, 109)), (3, 4, 50, 60)
    augment = Augmentation(SIZE, "RGB", lambda *_: box)
    plain, longer = (augment(content, random.Random(0)) for content in (data, data + b"\0" * 1000))
    assert difference(plain, longer) < 0.7


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xe0\0\x02\xff\xd9", b"text" * 99])
def test_what_is_no_image_is_refused(data, exactly):
    with pytest.raises(OSError, match=r"cannot identify its format|is empty"):
        Augmentation(SIZE, "RGB", draw_crop, exactly)(data, random.Random(0))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (500, 2), (17, 8)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_tiny_images(size, kind):
    data = content(Image.new("RGB", size, RED), kind)
    pixels = Augmentation(SIZE, "RGB", draw_crop)(data, random.Random(0))
    assert (pixels.float() - torch.tensor(RED).view(3, 1, 1)).abs().max() < 3


def test_the_exact_pipeline_is_torchvisions_to_the_bit():
    image = photo(150, 109)
    data, box = content(image), (7, 11, 80, 95)
    seed = next(seed for seed in range(99) if random.Random(seed).random() < 0.5)
    pixels = Augmentation(SIZE, "RGB", lambda *_: box, exact=True)(data, random.Random(seed))
    upstream = v1.functional.resized_crop(Image.open(io.BytesIO(data)), *box, SIZE, v1.InterpolationMode.BICUBIC)
    upstream = v1.functional.to_tensor(v1.functional.hflip(upstream))
    upstream = v1.functional.normalize(upstream, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert torch.equal(normalise(pixels[None])[0], upstream)


def test_exact_decode_changes_no_crop_and_no_flip():
    data, flips = content(photo(150, 109)), set()
    for seed in range(12):
        views = [Augmentation(SIZE, "RGB", draw_crop, exactly)(data, random.Random(seed)) for exactly in (False, True)]
        assert difference(*views) < 0.7
        flips.add(difference(views[0].flip(2), views[1]) < 0.7)
    assert flips == {False}, "a flip would be seen"


def test_half_of_the_views_are_mirrored():
    left = Image.new("L", (40, 30))
    left.paste(255, (0, 0, 20, 30))
    augment = Augmentation((8, 8), "L", lambda height, width, rng: (0, 0, height, width))
    mirrored = [augment(left, random.Random(seed))[0, 0, 0].item() == 0 for seed in range(400)]
    assert 150 < sum(mirrored) < 250
