"""Small pictures of every kind the loader reads, and what they decode to.

usage: python3 tests/golden/make_pictures.py        (needs Pillow, numpy, safetensors)

Writes tests/golden/pictures/* and tests/golden/pictures.safetensors, which holds for each file its
pixels as (H, W, 3) bytes over white, from Pillow or, where the file is put together here by hand,
from the arrays it was made of; and `fit.*`: Pillow's Lanczos resizes of one picture.
"""
import os
import struct
import zlib

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "pictures")
H, W = 20, 27
rng = np.random.default_rng(7)
expected = {}


def smooth(channels):
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 4), dtype=np.uint8), "RGBA")
    return np.array(small.resize((W, H), Image.BICUBIC))[:, :, :channels].copy()


def over_white(rgba):
    a = rgba[:, :, 3:].astype(np.int64)
    return ((rgba[:, :, :3] * a + 255 * (255 - a) + 127) // 255).astype(np.uint8)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_png(name, rows, width, height, depth, color, interlace=0, extra=b""):
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    with open(os.path.join(OUT, name), "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra
                + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b""))


def plain_rows(array):
    return b"".join(b"\0" + row.tobytes() for row in array)


def adam7_rows(array):
    out = b""
    for y0, x0, dy, dx in ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4),
                           (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)):
        part = array[y0::dy, x0::dx]
        if part.size:
            out += plain_rows(part)
    return out


def save(name, image, **options):
    path = os.path.join(OUT, name)
    image.save(path, **options)
    back = Image.open(path)
    if back.mode == "P" or "transparency" in back.info:
        back = back.convert("RGBA")
    if back.mode in ("RGBA", "LA"):
        expected[name] = over_white(np.array(back.convert("RGBA")))
    else:
        expected[name] = np.array(back.convert("RGB"))


def main():
    os.makedirs(OUT, exist_ok=True)
    rgb, rgba = Image.fromarray(smooth(3)), Image.fromarray(smooth(4))
    save("rgb.png", rgb)
    save("rgba.png", rgba)
    save("palette.png", rgb.quantize(16))
    quantized = rgb.quantize(16)
    save("palette-transparent.png", quantized, transparency=3)
    save("grey.png", rgb.convert("L"))
    save("grey-1bit.png", rgb.convert("1"))
    save("grey-alpha.png", rgba.convert("LA"))
    wide = rng.integers(0, 65536, (H, W, 3)).astype(">u2")
    write_png("rgb-16bit.png", plain_rows(wide), W, H, 16, 2)
    expected["rgb-16bit.png"] = ((wide.astype(np.int64) * 255 + 32895) >> 16).astype(np.uint8)
    write_png("interlaced.png", adam7_rows(np.array(rgb)), W, H, 8, 2, interlace=1)
    expected["interlaced.png"] = np.array(rgb)
    # gAMA must not change the values
    write_png("gamma.png", plain_rows(np.array(rgb)), W, H, 8, 2,
              extra=chunk(b"gAMA", struct.pack(">I", 100000)))
    expected["gamma.png"] = np.array(rgb)
    save("baseline.jpg", rgb, quality=92, subsampling=0)
    save("progressive.jpg", rgb, quality=85, progressive=True)
    save("grey.jpg", rgb.convert("L"), quality=90)
    cmyk = rgb.convert("CMYK")
    cmyk.save(os.path.join(OUT, "cmyk.jpg"), quality=95)
    ink = 255 - np.array(Image.open(os.path.join(OUT, "cmyk.jpg"))).astype(np.int64)
    expected["cmyk.jpg"] = ((ink[:, :, :3] * ink[:, :, 3:] + 127) // 255).astype(np.uint8)
    save("lossy.webp", rgb, quality=90)
    save("lossless-alpha.webp", rgba, lossless=True, exact=True)
    Image.fromarray(smooth(3)).save(os.path.join(OUT, "animated.webp"), save_all=True,
                                    append_images=[rgb], duration=100)
    noise = Image.fromarray(rng.integers(0, 256, (37, 50, 3), dtype=np.uint8))
    expected["fit.source"] = np.array(noise)
    for width, height in ((16, 16), (50, 12), (77, 64), (50, 37)):
        expected[f"fit.{width}x{height}"] = np.array(noise.resize((width, height), Image.LANCZOS))
    tensors = {k: np.ascontiguousarray(v) for k, v in expected.items()}
    save_file(tensors, os.path.join(HERE, "pictures.safetensors"))


main()
