"""Images: decoding, cropping, padding, resizing, turning, colours, as functions on numpy arrays for `Dataset.map`.

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
from raydist.image.colour import adjust_gamma as adjust_gamma
from raydist.image.colour import adjust_hue as adjust_hue
from raydist.image.colour import adjust_saturation as adjust_saturation
from raydist.image.colour import grayscale_to_rgb as grayscale_to_rgb
from raydist.image.colour import hsv_to_rgb as hsv_to_rgb
from raydist.image.colour import random_brightness as random_brightness
from raydist.image.colour import random_contrast as random_contrast
from raydist.image.colour import random_hue as random_hue
from raydist.image.colour import random_saturation as random_saturation
from raydist.image.colour import rgb_to_grayscale as rgb_to_grayscale
from raydist.image.colour import rgb_to_hsv as rgb_to_hsv
from raydist.image.crop import central_crop as central_crop
from raydist.image.crop import crop_and_resize as crop_and_resize
from raydist.image.crop import crop_to_bounding_box as crop_to_bounding_box
from raydist.image.crop import random_crop as random_crop
from raydist.image.decode import MAX_PIXELS as MAX_PIXELS
from raydist.image.decode import decode_and_crop_jpeg as decode_and_crop_jpeg
from raydist.image.decode import decode_and_random_crop as decode_and_random_crop
from raydist.image.decode import decode_image as decode_image
from raydist.image.decode import decode_jpeg as decode_jpeg
from raydist.image.decode import decode_png as decode_png
from raydist.image.decode import image_shape as image_shape
from raydist.image.resize import flip_left_right as flip_left_right
from raydist.image.resize import flip_up_down as flip_up_down
from raydist.image.resize import pad_to_bounding_box as pad_to_bounding_box
from raydist.image.resize import random_flip_left_right as random_flip_left_right
from raydist.image.resize import random_flip_up_down as random_flip_up_down
from raydist.image.resize import resize as resize
from raydist.image.resize import resize_with_crop_or_pad as resize_with_crop_or_pad
from raydist.image.resize import resize_with_pad as resize_with_pad
from raydist.image.resize import rot90 as rot90
from raydist.image.resize import transpose as transpose
from raydist.image.value_range import channels_first as channels_first
from raydist.image.value_range import convert_image_dtype as convert_image_dtype
from raydist.image.value_range import normalize as normalize
from raydist.image.value_range import per_image_standardization as per_image_standardization
from raydist.pipelines.formats.files import read_file as read_file

__all__ = [
    "MAX_PIXELS",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_gamma",
    "adjust_hue",
    "adjust_saturation",
    "central_crop",
    "channels_first",
    "convert_image_dtype",
    "crop_and_resize",
    "crop_to_bounding_box",
    "decode_and_crop_jpeg",
    "decode_and_random_crop",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "flip_left_right",
    "flip_up_down",
    "grayscale_to_rgb",
    "hsv_to_rgb",
    "image_shape",
    "normalize",
    "pad_to_bounding_box",
    "per_image_standardization",
    "random_brightness",
    "random_contrast",
    "random_crop",
    "random_flip_left_right",
    "random_flip_up_down",
    "random_hue",
    "random_saturation",
    "read_file",
    "resize",
    "resize_with_crop_or_pad",
    "resize_with_pad",
    "rgb_to_grayscale",
    "rgb_to_hsv",
    "rot90",
    "transpose",
]
