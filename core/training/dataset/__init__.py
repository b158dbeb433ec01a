"""Pictures and videos with captions, from a folder to tensors of one size a bucket."""

from .buckets import Bucket, choose_bucket, list_buckets
from .folder import FolderOptions, folder_version, load_training_folder
from .items import MediaItem, TrainingSet, join_sets, plain_examples, read_pixels
from .pictures import UnreadablePictureError, decode_picture, fit_to_bucket

__all__ = [
    "Bucket",
    "FolderOptions",
    "MediaItem",
    "TrainingSet",
    "UnreadablePictureError",
    "choose_bucket",
    "decode_picture",
    "fit_to_bucket",
    "folder_version",
    "join_sets",
    "list_buckets",
    "load_training_folder",
    "plain_examples",
    "read_pixels",
]
