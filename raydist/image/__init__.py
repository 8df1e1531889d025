"""Images: decoding, cropping, resizing, flipping, colours, as functions on numpy arrays for `Dataset.map`.

An image is an array of shape (height, width, channels), uint8 or float32. Where it says so, functions also take a
batch, (images, height, width, channels). Random ones take `rng`, which `Dataset.map` hands to functions that name it::

    def load(path, *, rng):
        image = rd.image.decode_jpeg(rd.image.read_file(path), channels=3)
        image = rd.image.random_flip_left_right(rd.image.random_crop(image, (224, 224), rng=rng), rng=rng)
        return rd.image.normalize(image, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

    images = rd.Dataset.list_files("photos/*.jpg").map(load, num_parallel_calls=2).batch(32)

Names and arguments are those of tf.image where it has them. Decoding and resizing need the extra `raydist[images]`
(libjpeg-turbo by simplejpeg, and Pillow); both release the GIL, so threads work side by side.
"""

from __future__ import annotations

from raydist.image.colour import adjust_brightness as adjust_brightness
from raydist.image.colour import adjust_contrast as adjust_contrast
from raydist.image.colour import random_brightness as random_brightness
from raydist.image.colour import random_contrast as random_contrast
from raydist.image.crop import central_crop as central_crop
from raydist.image.crop import crop_to_bounding_box as crop_to_bounding_box
from raydist.image.crop import random_crop as random_crop
from raydist.image.decode import decode_and_random_crop as decode_and_random_crop
from raydist.image.decode import decode_image as decode_image
from raydist.image.decode import image_shape as image_shape
from raydist.image.encoded import MAX_PIXELS as MAX_PIXELS
from raydist.image.flip import flip_left_right as flip_left_right
from raydist.image.flip import flip_up_down as flip_up_down
from raydist.image.flip import random_flip_left_right as random_flip_left_right
from raydist.image.flip import random_flip_up_down as random_flip_up_down
from raydist.image.jpeg import decode_and_crop_jpeg as decode_and_crop_jpeg
from raydist.image.jpeg import decode_jpeg as decode_jpeg
from raydist.image.normalize import channels_first as channels_first
from raydist.image.normalize import normalize as normalize
from raydist.image.png import decode_png as decode_png
from raydist.image.resize import resize as resize
from raydist.pipelines.formats.whole_file import read_file as read_file

__all__ = [
    "MAX_PIXELS",
    "adjust_brightness",
    "adjust_contrast",
    "central_crop",
    "channels_first",
    "crop_to_bounding_box",
    "decode_and_crop_jpeg",
    "decode_and_random_crop",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "flip_left_right",
    "flip_up_down",
    "image_shape",
    "normalize",
    "random_brightness",
    "random_contrast",
    "random_crop",
    "random_flip_left_right",
    "random_flip_up_down",
    "read_file",
    "resize",
]
