"""Pictures and videos with captions, from a folder to tensors of one size a bucket."""

from .buckets import Bucket, choose_bucket, list_buckets
from .cache_files import BrokenCacheError, CacheEntry, CacheFolder, cache_key
from .content_digest import content_digest, tensors_digest
from .folder import FolderOptions, folder_version, load_training_folder, order_folders
from .items import MediaItem, TrainingSet, join_sets, plain_examples, read_pixels
from .pictures import UnreadablePictureError, decode_picture, fit_to_bucket
from .training_cache import CachedItem, TrainingCache

__all__ = [
    "BrokenCacheError",
    "Bucket",
    "CacheEntry",
    "CacheFolder",
    "CachedItem",
    "FolderOptions",
    "MediaItem",
    "TrainingCache",
    "TrainingSet",
    "UnreadablePictureError",
    "cache_key",
    "choose_bucket",
    "content_digest",
    "decode_picture",
    "fit_to_bucket",
    "folder_version",
    "join_sets",
    "list_buckets",
    "load_training_folder",
    "order_folders",
    "plain_examples",
    "read_pixels",
    "tensors_digest",
]
