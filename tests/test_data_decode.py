"""One image of any kind → a square of uint8."""

import io
import os
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from secu.config import DataConfig
from secu.data import load, open_source
from secu.data.decoding.decode import MAX_PIXELS, decode
from secu.data.decoding.image_files import BadImage
from secu.data.decoding.probe import read_header

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quarters(side=40):
    """Four colors: every flip and turn shows."""
    image = Image.new("RGB", (side, side))
    half = side // 2
    for place, color in zip([(0, 0), (half, 0), (0, half), (half, half)], [RED, GREEN, BLUE, WHITE], strict=True):
        image.paste(color, (*place, place[0] + half, place[1] + half))
    return image


def encoded(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def square(image, size):
    """The oracle: scale the shorter side, then keep the center."""
    scale = size / min(image.size)
    scaled = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
    left, top = (scaled.width - size) // 2, (scaled.height - size) // 2
    return np.asarray(scaled.crop((left, top, left + size, top + size)).convert("RGB")).transpose(2, 0, 1)


def inner(pixels):
    """Without the borders between the quarters of 10 x 10, where JPEG scales in its own way."""
    return np.delete(np.delete(pixels, [4, 5], 1), [4, 5], 2)


def close(a, b, tolerance=3):
    return np.abs(a.astype(int) - b.astype(int)).max() <= tolerance


@pytest.mark.parametrize(
    ("format", "options", "tolerance"),
    [
        ("JPEG", {"quality": 98, "subsampling": 0}, 3),
        ("JPEG", {"quality": 98, "subsampling": 0, "progressive": True}, 3),
        ("PNG", {}, 1),
        ("WEBP", {"lossless": True}, 1),
        ("BMP", {}, 1),
        ("TIFF", {}, 1),
        ("TIFF", {"compression": "tiff_lzw"}, 1),
        ("GIF", {}, 1),
        ("PPM", {}, 1),
    ],
)
def test_every_format(format, options, tolerance):
    pixels = decode(encoded(quarters(), format, **options), 10, 3)
    assert pixels.shape == (3, 10, 10)
    assert pixels.dtype == np.uint8
    assert close(inner(pixels), inner(square(quarters(), 10)), tolerance)


def test_a_file_is_read_like_its_bytes(tmp_path):
    quarters().save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    assert np.array_equal(decode(path, 8, 3), decode((tmp_path / "a.png").read_bytes(), 8, 3))


@pytest.mark.parametrize(
    "size", [(64, 32), (32, 64), (96, 32), (16, 48), (8, 24), (16, 16), (16, 80), (8, 40), (64, 12)]
)
def test_the_shorter_side_is_scaled_and_the_center_kept(size):
    noise = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR)
    assert close(decode(encoded(image, "PNG"), 16, 3), square(image, 16), 6)


@pytest.mark.parametrize("size", [(300, 7), (9, 400), (1, 90), (64, 3)])
@pytest.mark.parametrize("wanted", [1, 5, 16])
def test_a_strip_is_cut_before_it_is_converted_without_a_trace(size, wanted):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0]), dtype=np.uint8)
    image = Image.fromarray(noise)
    left, top, side = (size[0] - min(size)) / 2, (size[1] - min(size)) / 2, min(size)
    whole = image.resize((wanted, wanted), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    assert np.array_equal(decode(encoded(image, "PNG"), wanted, 1)[0], np.asarray(whole))


@pytest.mark.parametrize("size", [(7, 300), (1, 1), (1, 90), (33, 32), (5000, 1)])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_odd_shapes(size, format):
    assert (decode(encoded(Image.new("RGB", size, WHITE), format), 16, 3) == 255).all()


def test_one_pixel_fills_the_square():
    assert (
        decode(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"), 5, 3) == np.array([9, 8, 7])[:, None, None]
    ).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_the_picture_as_pillow_would(format, orientation):
    from PIL import ImageOps

    noise = np.random.default_rng(1).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((40, 60), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(format, {})
    content = encoded(image, format, exif=exif, **options)
    with Image.open(io.BytesIO(content)) as file:
        turned = ImageOps.exif_transpose(file).convert("RGB")
    assert turned.size == ((60, 40) if orientation > 4 else (40, 60))
    pixels = decode(content, 40, 3)
    left, top = (turned.width - 40) // 2, (turned.height - 40) // 2
    wanted = np.asarray(turned.crop((left, top, left + 40, top + 40))).transpose(2, 0, 1)
    assert close(pixels, wanted, 1)


def test_a_damaged_exif_block_does_not_spoil_the_picture():
    content = encoded(quarters(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode(content, 10, 3).shape == (3, 10, 10)


def test_gray_stays_gray_and_color_becomes_gray():
    ramp = Image.linear_gradient("L")
    for image in (ramp, ramp.convert("RGB")):
        for format in ("PNG", "JPEG"):
            assert close(decode(encoded(image, format), 32, 1)[0], np.asarray(ramp.resize((32, 32), 2)), 3)
    color = decode(encoded(ramp, "PNG"), 32, 3)
    assert (color[0] == color[1]).all()
    corners = decode(encoded(quarters(), "PNG"), 10, 1)[0, ::9, ::9]
    assert corners.ravel().tolist() == [76, 150, 29, 255]  # ITU-R 601 luma


def test_one_bit():
    image = Image.new("1", (8, 8))
    image.paste(1, (4, 0, 8, 8))
    for format in ("PNG", "BMP", "TIFF"):
        assert decode(encoded(image, format), 8, 1)[0, 3].tolist() == [0] * 4 + [255] * 4


def test_palette():
    assert close(decode(encoded(quarters().quantize(4), "PNG"), 4, 3), square(quarters(), 4))


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_transparent_entry_of_a_palette_is_white(format):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.paste(1, (4, 0, 8, 8))
    left, right = decode(encoded(image, format, transparency=0), 8, 3)[:, 0, ::7].T.tolist()
    assert left == [255, 255, 255]
    assert right == [0, 0, 200]


def test_a_palette_with_half_transparent_entries():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    pixel = decode(encoded(image, "PNG", transparency=bytes([128, 255])), 1, 3).ravel().tolist()
    assert close(np.array(pixel), np.array([227, 127, 127]), 1)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_laid_on_white(format):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((255, 0, 0, 128), (4, 0, 8, 8))
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    left, right = decode(encoded(image, format, **options), 8, 3)[:, 0, ::7].T
    assert left.tolist() == [255, 255, 255]
    assert close(right, np.array([255, 127, 127]), 1)


def test_hidden_colors_of_transparent_pixels_do_not_bleed():
    image = Image.new("RGBA", (8, 8), (255, 0, 255, 0))
    image.paste((0, 0, 0, 255), (0, 0, 3, 8))
    pixels = decode(encoded(image, "PNG"), 5, 3)
    assert (pixels[0] == pixels[1]).all()


def test_gray_with_alpha():
    image = Image.new("LA", (4, 4), (0, 128))
    for channels in (1, 3):
        assert close(decode(encoded(image, "PNG"), 1, channels), np.full((channels, 1, 1), 127), 1)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_color_that_stands_for_transparent(mode):
    image = Image.new(mode, (4, 4))
    key = 0 if mode == "L" else (0, 0, 0)
    assert (decode(encoded(image, "PNG", transparency=key), 2, 3) == 255).all()


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk(format):
    image = quarters().convert("CMYK")
    assert close(inner(decode(encoded(image, format, quality=98), 10, 3)), inner(square(quarters(), 10)), 6)
    assert decode(encoded(image, format), 10, 1).shape == (1, 10, 10)


@pytest.mark.parametrize("mode", ["YCbCr", "LAB"])
def test_other_color_spaces_of_tiff(mode):
    from PIL import ImageCms

    if mode == "LAB":
        to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
        image = ImageCms.applyTransform(quarters(), to_lab)
    else:
        image = quarters().convert(mode)
    assert decode(encoded(image, "TIFF"), 10, 3).shape == (3, 10, 10)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bits_drop_the_lower_8(format):
    values = np.array([[0, 255, 256, 4095], [32768, 65280, 65535, 513]], np.uint16).repeat(2, 0)
    pixels = decode(encoded(Image.fromarray(values), format), 4, 1)[0]
    assert np.array_equal(pixels, values >> 8)


def test_16_bits_a_channel():
    """Pillow writes none, so this is one by hand."""
    row = b"\0" + struct.pack(">6H", 65535, 32768, 0, 256, 513, 65280)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * 2)),
        (b"IEND", b""),
    ]:
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    assert decode(content, 2, 3)[:, 0].T.tolist() == [[255, 128, 0], [1, 2, 255]]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.array([[0, 255], [7, 9]], np.int32), [0, 255, 7, 9]),
        (np.array([[0, 65535], [256, 512]], np.int32), [0, 255, 1, 2]),
        (np.array([[-100, 100], [-20, 20]], np.int32), [0, 255, 102, 153]),
        (np.array([[0, 1], [0.5, 0.25]], np.float32), [0, 255, 128, 64]),
        (np.array([[0, 200], [0.5, 3]], np.float32), [0, 200, 0, 3]),
        (np.array([[5e5, 1e6], [5e5, 1e6]], np.float32), [0, 255, 0, 255]),
        (np.array([[-7, -7], [-7, -7]], np.float32), [0, 0, 0, 0]),
    ],
)
def test_wide_values_go_by_their_range(values, wanted):
    assert decode(encoded(Image.fromarray(values), "TIFF"), 2, 1).ravel().tolist() == wanted


def test_a_float_image_with_nan_is_bad():
    with pytest.raises(BadImage, match=r"NaN or infinite"):
        decode(encoded(Image.fromarray(np.array([[0, np.nan]], np.float32)), "TIFF"), 2, 1)


def test_the_first_frame_of_many():
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, GREEN)]
    for format in ("GIF", "WEBP", "TIFF", "PNG"):
        content = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        red, green, _ = decode(content, 1, 3).ravel().tolist()
        assert red > 240
        assert green < 15


def test_content_not_name_tells_the_format(tmp_path):
    quarters().save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.jpg")
    assert decode(str(tmp_path / "a.jpg"), 4, 3).shape == (3, 4, 4)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
@pytest.mark.parametrize("keep", [0.02, 0.3, 0.6, 0.9])
def test_truncated_files_are_bad(format, keep):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), format)
    with pytest.raises(BadImage) as caught:
        decode(content[: int(keep * len(content))], 16, 3)
    assert caught.value.reason
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"hello", "not an image of a kind"),
        (b"P", "not an image of a kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a kind"),  # would start ghostscript
        (b"\xff\xd8\xff" + b"x" * 50, "."),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 50, "."),
    ],
)
def test_what_is_no_image_is_bad(content, reason):
    with pytest.raises(BadImage, match=reason):
        decode(content, 8, 3)


def test_random_damage_never_escapes():
    """Every exception of pillow's parsers becomes a reason; some damage is not noticed, which is fine."""
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"):
            content = np.frombuffer(encoded(noise, format), np.uint8)
            for _ in range(150):
                damaged = content.copy()
                places = random.integers(0, min(len(content), 400), 4)
                damaged[places] = random.integers(0, 256, 4)
                try:
                    assert decode(damaged.tobytes(), 8, 3).shape == (3, 8, 8)
                except BadImage as bad:
                    assert bad.reason  # noqa: PT017


def test_what_the_system_refuses_is_a_reason(tmp_path):
    with pytest.raises(BadImage, match=r"^No such file or directory$") as caught:
        decode(str(tmp_path / "none.png"), 8, 3)
    assert caught.value.lasting
    with pytest.raises(BadImage, match=r"not a file"):
        decode(str(tmp_path), 8, 3)


def test_errors_that_may_pass_are_not_lasting(tmp_path, monkeypatch):
    import secu.data.decoding.decode as module

    quarters().save(tmp_path / "a.png")
    for error in (MemoryError(), OSError(5, "Input/output error")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(module, "_plain", fail)
        with pytest.raises(BadImage, match=r"not enough memory|Input/output error") as caught:
            decode(str(tmp_path / "a.png"), 8, 3)
        assert not caught.value.lasting


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(BadImage, match=r"not a file"):
        decode(str(tmp_path / "a.jpg"), 8, 3)


def huge_png(side):
    """A 1-bit PNG of nothing but black, packed row by row: small on disk."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]:
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return content


def test_20000_by_20000_is_refused_at_once():
    content = huge_png(20_000)
    assert len(content) < 1_000_000
    start = time.perf_counter()
    with pytest.raises(
        BadImage, match=r"^20000 x 20000 are 400,000,000 pixels; the limit is 100,000,000 \(data.max_pixels\)$"
    ):
        decode(content, 64, 3)
    assert time.perf_counter() - start < 10
    with pytest.raises(BadImage, match=r"data.max_pixels"):
        read_header(content)
    assert read_header(content, 10**9)[:3] == (20_000, 20_000, True)


def test_100_million_pixels_are_read_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not decode(huge_png(10_000), 32, 1).any()


def claiming(side, **options):
    """Return a JPEG whose header claims to be larger than it is."""
    content = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG", **options))
    frame = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
    content[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    return bytes(content)


@pytest.mark.parametrize(
    ("side", "options", "reason"),
    [
        (65_500, {}, r"65500 x 65500 are 4,290,250,000 pixels; the limit is 800,000,000 \(8 times data.max_pixels\)"),
        (20_000, {"progressive": True}, r"are 400,000,000 pixels; the limit is 100,000,000 \(data.max_pixels\)"),
    ],
)
def test_a_jpeg_may_claim_eight_times_as_many_pixels(side, options, reason):
    with pytest.raises(BadImage, match=reason):
        decode(claiming(side, **options), 64, 3)


def test_the_limit_is_a_setting(tmp_path):
    """Another limit is another state of the cache: it decides which images are left out."""
    assert DataConfig().max_pixels == MAX_PIXELS
    for side in (20, 21):
        Image.new("RGB", (side, side)).save(tmp_path / f"{side}.png")
    for limit, count in ((MAX_PIXELS, 2), (400, 1), (441, 2)):
        config = DataConfig(source=str(tmp_path), image_size=8, channels=3, max_pixels=limit)
        assert open_source(tmp_path).limited(limit).probe().side == 20  # the lower median
        images = load(config, cache=tmp_path / "cache", allow_bad=True)
        assert len(images) == count
        assert [reason for _, reason in images.skipped] == (
            ["21 x 21 are 441 pixels; the limit is 400 (data.max_pixels)"] if limit == 400 else []
        )


WORST = """
import resource, sys
from secu.config import DataConfig
from secu.data import load, open_source
from secu.data.decoding.decode import MAX_PIXELS, decode
from secu.data.decoding.image_files import BadImage
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode(open(sys.argv[1], "rb").read(), 64, 3, None, int(sys.argv[2]))
except BadImage as error:
    print(error, file=sys.stderr)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in other units elsewhere")
@pytest.mark.parametrize(
    ("name", "mode", "options", "most"),
    [
        ("a.webp", "RGBA", {"lossless": True, "method": 0, "quality": 0}, 16.5),  # a file of 34 bytes
        ("a.png", "LA", {"compress_level": 1}, 12.5),
        ("a.tif", "RGBA", {"compression": "tiff_deflate"}, 8.5),
        ("a.jpg", "CMYK", {"progressive": True}, 9),
        ("a.png", "RGB", {"compress_level": 1}, 4.5),
    ],
)
def test_memory_of_the_worst_files_that_are_accepted(tmp_path, name, mode, options, most):
    """Bytes per pixel, measured with 10 million: of all kinds of files, a WebP of 100 million takes most, 1.6 GB."""
    pixels = 10_000_000
    Image.new(mode, (4000, 2500)).save(tmp_path / name, **options)
    command = [sys.executable, "-c", WORST, str(tmp_path / name), str(pixels)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) < most * pixels + (16 << 20)
    assert most * MAX_PIXELS <= 1.65e9


def test_a_jpeg_of_20000_by_20000_is_decoded_at_an_eighth():
    content = encoded(Image.new("L", (20_000, 20_000), 99), "JPEG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(decode(content, 64, 3), np.full((3, 64, 64), 99), 1)


def test_large_images_are_decoded_one_at_a_time(monkeypatch):
    import secu.data.decoding.decode as module

    monkeypatch.setattr(module, "LARGE", 100)
    content = encoded(quarters(), "PNG")
    module._one_large.acquire()
    thread = threading.Thread(target=decode, args=(content, 8, 3))
    thread.start()
    thread.join(0.2)
    waited = thread.is_alive()
    module._one_large.release()
    thread.join()
    assert waited


def test_headers():
    assert read_header(encoded(Image.new("RGB", (30, 20)), "JPEG")) == (30, 20, False, False)
    for image in (Image.new("L", (3, 2)), Image.new("LA", (3, 2)), Image.new("1", (3, 2)), Image.new("I;16", (3, 2))):
        assert read_header(encoded(image, "PNG")) == (3, 2, True, image.mode == "I;16")
    assert read_header(encoded(Image.new("F", (3, 2)), "TIFF")).gray
    assert read_header(np.zeros((4, 6), np.uint8)) == (6, 4, True, False)
    assert read_header(np.zeros((4, 6, 3), np.uint8)) == (6, 4, False, False)
